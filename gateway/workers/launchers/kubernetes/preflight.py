"""Checks whether a job could start in the cluster, in a pod without the job's claim.

An init container makes the checks of `tandem.agent.preflight`, with the job's image, user, mounts
and nodes. So a job that cannot start holds no device. The pod ends with its check. The reconciler
removes the pods of a gateway that was killed."""

from __future__ import annotations

import asyncio

from gateway.workers.launchers.kubernetes.api import Api, ApiFault
from gateway.workers.launchers.kubernetes.maker import WorkerMaker
from gateway.workers.launchers.kubernetes.names import CONTAINER, PODS, WORKER_ID
from gateway.workers.launchers.kubernetes.observed import Pod, Terminated
from gateway.workers.launchers.kubernetes.pod_spec import CHECK
from gateway.workers.launchers.kubernetes.pods import state_of
from gateway.workers.launchers.kubernetes.reconcile import Reconciler
from gateway.workers.launchers.kubernetes.removal import KILL_GRACE
from gateway.workers.launchers.kubernetes.steps import name_of
from tandem.agent.preflight import JobNeeds, PreflightCheck, read_checks
from tandem.errors import WorkerStartFailed, without_paths

_LOOK = 0.5
"""Seconds between two looks at the pod. A watch brings its changes."""
_GONE = 30.0
"""The most seconds until a checked pod is gone."""


class PreflightPods:
    """An image has `pull_timeout` seconds to come. Events are read every `poll` seconds."""

    def __init__(
        self,
        api: Api,
        maker: WorkerMaker,
        reconciler: Reconciler,
        *,
        pull_timeout: float,
        poll: float,
    ) -> None:
        self._api = api
        self._maker = maker
        self._reconciler = reconciler
        self._pull_timeout = pull_timeout
        self._poll = poll

    async def check_needs(self, needs: JobNeeds, *, timeout: float) -> tuple[PreflightCheck, ...]:
        """Return the faults, and nothing if the job can start. The checks have `timeout` seconds,
        and so has the scheduler. Raises `WorkerStartFailed` if no pod can make them."""
        body = self._maker.make_preflight(needs)
        worker_id = body["metadata"]["annotations"][WORKER_ID]
        self._reconciler.kept.add(worker_id)
        try:
            await self._api.create(PODS, body)
            return await self._checked(name_of(body), timeout)
        except ApiFault as error:
            said = without_paths(str(error))
            raise WorkerStartFailed(f"the cluster makes no pod for the checks: {said}") from error
        finally:
            self._reconciler.kept.discard(worker_id)
            gone = self._reconciler.remove_worker(worker_id, grace=KILL_GRACE)
            await asyncio.wait({gone}, timeout=_GONE)

    async def _checked(self, name: str, timeout: float) -> tuple[PreflightCheck, ...]:
        """Follow the pod through its stages, each with its own time."""
        loop = asyncio.get_running_loop()
        stage, since, read_at = "unscheduled", loop.time(), 0.0
        while True:
            await asyncio.sleep(_LOOK)
            pod = self._reconciler.pods.objects.get(name)
            now_in, now = _stage_of(pod), loop.time()
            if now_in != stage:
                stage, since = now_in, now
            if pod is not None and stage == "preparing" and now - read_at >= self._poll:
                read_at = now
                if told := await self._reconciler.read_warning([pod]):
                    return (_unmounted(told),)
            match stage:
                case "checked" if pod is not None and (end := _end_of(pod)) is not None:
                    return _faults_of(end)
                case "ended" if pod is not None:
                    raise WorkerStartFailed(_says(pod))
                case "pulling" if pod is not None:
                    about = _says(pod)
                    return (PreflightCheck("image", "not pulled", about, "image_unavailable"),)
                case "checking" if now - since > timeout:
                    about = f"no answer within {timeout:g} s: a shared folder may hang"
                    return (PreflightCheck("preflight", "", about, "timed_out"),)
                case "unscheduled" if now - since > timeout:
                    said = _says(pod) if pod is not None else "it is not made yet"
                    raise WorkerStartFailed(f"the pod of the job's checks waits: {said}")
                case "preparing" if pod is not None and now - since > self._pull_timeout:
                    raise WorkerStartFailed(f"the pod of the job's checks waits: {_says(pod)}")


def _stage_of(pod: Pod | None) -> str:
    """Return a stage of `pods`, or `checking` and `checked` of the init container."""
    if pod is None:
        return "unscheduled"
    if _end_of(pod) is not None:
        return "checked"
    if any(each.state.running is not None for each in pod.status.init_container_statuses):
        return "checking"
    return state_of(pod, kind="job", container=CONTAINER).stage


def _end_of(pod: Pod) -> Terminated | None:
    ends = (e.state.terminated for e in pod.status.init_container_statuses if e.name == CHECK)
    return next(ends, None)


def _says(pod: Pod) -> str:
    return state_of(pod, kind="job", container=CONTAINER).says


def _faults_of(end: Terminated) -> tuple[PreflightCheck, ...]:
    if end.exit_code == 0:
        return ()
    if checks := read_checks(end.message):
        return checks
    how = f"status {end.exit_code}" + (f", {end.reason}" if end.reason else "")
    about = without_paths(f"the image is not that of this gateway's release: {end.message}".strip())
    return (PreflightCheck("checks", how, about, "interpreter_unusable"),)


def _unmounted(told: str) -> PreflightCheck:
    return PreflightCheck("volume", "not mounted", told, "volume_unavailable")
