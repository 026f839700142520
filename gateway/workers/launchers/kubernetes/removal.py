"""Removes ended or unwanted workers. Pods are deleted first, so that none starts without its
specification."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.workers.launchers.kubernetes.observed import Observed, Pod
from gateway.workers.launchers.kubernetes.pods import node_is_lost, runs, why_lost
from gateway.workers.launchers.kubernetes.steps import Steps
from gateway.workers.launchers.kubernetes.view import View
from gateway.workers.launchers.kubernetes.worker import PodWorker
from tandem.telemetry import get_log

KILL_GRACE = 1
"""Seconds of grace for a kill. With 0, a pod would be forgotten while it may still run."""


@dataclass(eq=False)
class Ending:
    """A worker being removed. `failed` is a worker with an end to report."""

    grace: int
    gone: asyncio.Future[None]
    failed: PodWorker | None = None


class Removal:
    """`ended` gets a failed worker when it is gone. Pods of a node that is lost for `node_lost`
    seconds are forgotten. `lost_since` has, by pod uid, the start of the loss, reset by gaps in the
    view."""

    def __init__(
        self,
        steps: Steps,
        *,
        pods: View[Pod],
        others: tuple[View[Observed], ...],
        node_lost: float,
        ended: Callable[[PodWorker], None],
    ) -> None:
        self.endings: dict[str, Ending] = {}
        self.lost_since: dict[str, float] = {}
        self._deleted_since: dict[str, float] = {}
        self._steps = steps
        self._pods = pods
        self._others = others
        self._node_lost = node_lost
        self._ended = ended
        self._log = get_log()

    def begin(
        self, worker_id: str, *, grace: int, failed: PodWorker | None = None
    ) -> asyncio.Future[None]:
        ending = self.endings.get(worker_id)
        if ending is None:
            gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            ending = self.endings[worker_id] = Ending(grace, gone)
        ending.grace = min(ending.grace, grace)
        ending.failed = failed
        return ending.gone

    def close(self) -> None:
        for ending in self.endings.values():
            ending.gone.cancel()

    def note_pod(self, pod: Pod, *, there: bool) -> None:
        seconds = asyncio.get_running_loop().time()
        for since, holds in (
            (self.lost_since, there and node_is_lost(pod)),
            (self._deleted_since, there and pod.deleted),
        ):
            if holds:
                since.setdefault(pod.metadata.uid, seconds)
            else:
                since.pop(pod.metadata.uid, None)

    def note_gap(self) -> None:
        """Restart the clocks of lost nodes, because one may have answered unseen."""
        now = asyncio.get_running_loop().time()
        self.lost_since = dict.fromkeys(self.lost_since, now)
        self._deleted_since = dict.fromkeys(self._deleted_since, now)

    def why_left(self, worker_id: str) -> str:
        pods = self._pods.objects_of(worker_id)
        why = next((why_lost(pod) for pod in pods if node_is_lost(pod)), "")
        if not why:
            silent = (pod.spec.node_name for pod in pods if pod.deleted and runs(pod))
            why = next((f"its node {name} has not said that it has ended" for name in silent), "")
        names = ", ".join(pod.name for pod in pods) or "its Secret"
        return f"not gone yet: {names}" + (f"; {why}" if why else "")

    def remove(self, worker_id: str, *, current: bool) -> None:
        """Delete a worker's objects. `current`: the views are complete."""
        ending = self.endings.get(worker_id)
        grace = ending.grace if ending is not None else KILL_GRACE
        certain = self._steps.is_certain(worker_id)
        pods = self._pods.objects_of(worker_id)
        for pod in pods:
            self.delete_pod(pod, grace)
        others = [(view, each) for view in self._others for each in view.objects_of(worker_id)]
        if certain and not pods:
            for view, each in others:
                self._steps.delete(view, each, worker=worker_id)
        if ending is None or pods or others or not certain or not current:
            return
        del self.endings[worker_id]
        if not ending.gone.done():
            ending.gone.set_result(None)
        if ending.failed is not None:
            self._ended(ending.failed)

    def delete_pod(self, pod: Pod, grace: int) -> None:
        worker_id = pod.worker_id
        given = pod.metadata.deletion_grace_period_seconds or 0
        if self._is_forgettable(pod, given):
            self._log.warning("pod_forgotten", pod=pod.name, node=pod.spec.node_name)
            self._steps.delete(self._pods, pod, worker=worker_id, grace=0)
        elif not pod.deleted or given > grace:
            self._steps.delete(self._pods, pod, worker=worker_id, grace=grace)

    def _is_forgettable(self, pod: Pod, given: int) -> bool:
        """Return whether the pod can be forgotten: its node is lost, or it has no running container
        and its time to end is over. Otherwise it may still hold the devices."""
        now, most = asyncio.get_running_loop().time(), self._node_lost
        if node_is_lost(pod):
            return now - self.lost_since.get(pod.metadata.uid, now) >= most
        return not runs(pod) and (
            now - self._deleted_since.get(pod.metadata.uid, now) >= given + most
        )
