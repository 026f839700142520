"""Compares wanted workers with the cluster, and carries out the difference.

Workers are wanted from `want` to `remove_worker`. Each changed worker is compared, and each second
all that start or end. Missing objects are created and unwanted ones deleted (`removal`). A step may
fail; then the next comparison finds the rest. So a gateway may die between any two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from gateway.workers.epoch import Epoch
from gateway.workers.launchers.kubernetes.api import Api, Refused
from gateway.workers.launchers.kubernetes.claims import Claims
from gateway.workers.launchers.kubernetes.maker import WorkerMaker
from gateway.workers.launchers.kubernetes.names import (
    CLAIMS,
    CONTAINER,
    EVENTS,
    GROUP,
    INSTANCE,
    PODS,
    POLICIES,
    SECRETS,
    SERVICES,
    WORKER,
    pool_name,
)
from gateway.workers.launchers.kubernetes.objects import WorkerObjects
from gateway.workers.launchers.kubernetes.observed import Claim, Event, Observed, Pod
from gateway.workers.launchers.kubernetes.pods import told_by_events
from gateway.workers.launchers.kubernetes.removal import KILL_GRACE, Removal
from gateway.workers.launchers.kubernetes.steps import Key, Steps, name_of
from gateway.workers.launchers.kubernetes.view import View
from gateway.workers.launchers.kubernetes.worker import Deadlines, PodFailure, PodWorker
from tandem.errors import WorkerCrashed, WorkerStartFailed, without_paths
from tandem.protocol.worker import WorkerSpec
from tandem.telemetry import get_log

_TICK = 1.0
_SWEEP = 5.0
"""Seconds between searches for unwanted objects."""
_TOGETHER = 0.02
"""Seconds for which changes are collected."""
_PATIENCE = 5.0
_LOG_LINES = 5
_LONGEST_TAIL = 4096


class Reconciler:
    """`ended` gets a failed worker when it is gone. When objects of a newer gateway appear, the
    epoch is told, and nothing more is touched."""

    def __init__(
        self,
        api: Api,
        maker: WorkerMaker,
        *,
        instance: str,
        epoch: Epoch,
        deadlines: Deadlines,
        resync: float,
        ended: Callable[[PodWorker], None],
    ) -> None:
        self.workers: dict[str, PodWorker] = {}
        self.kept: set[str] = set()
        """Ids of pods that belong to no worker, and that nothing removes."""
        self.sweeps = False
        """Whether unwanted objects are deleted: only after the wanted workers are known."""
        self._api = api
        self._epoch = epoch
        self._maker = maker
        self._deadlines = deadlines
        self._is_superseded = False
        self._steps = Steps(api, epoch=epoch.number, done=self._touch, fail=self.fail)
        self._dirty: set[str] = set()
        self._turns_changed = False
        """Whether a waiting worker may have its turn now."""
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._log = get_log()
        ours, groups = f"{INSTANCE}={instance},{WORKER}", f"{INSTANCE}={instance},{GROUP}"
        view = partial(View, api, resync=resync)
        self.pods: View[Pod] = view(PODS, Pod, labels=ours, changed=self._note_pod)
        self.claims: View[Claim] = view(CLAIMS, Claim, labels=groups, changed=self._note_claim)
        self.secrets: View[Observed] = view(SECRETS, Observed, labels=ours, changed=self._note)
        self.services: View[Observed] = view(SERVICES, Observed, labels=ours, changed=self._note)
        self.policies: View[Observed] = view(POLICIES, Observed, labels=ours, changed=self._note)
        self._claims = Claims(
            self._steps, self.claims, pods=self.pods, idle_seconds=maker.idle_seconds
        )
        self._removal = Removal(
            self._steps,
            pods=self.pods,
            others=(self.secrets, self.services, self.policies),
            node_lost=deadlines.node_lost,
            ended=ended,
        )

    @property
    def views(self) -> tuple[View[Pod] | View[Claim] | View[Observed], ...]:
        return self.pods, self.claims, self.secrets, self.services, self.policies

    @property
    def current(self) -> bool:
        return all(each.current for each in self.views)

    def start_following(self) -> None:
        followers = (each.follow() for each in self.views)
        self._tasks = [asyncio.create_task(each) for each in (*followers, self._run())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._steps.close()
        self._removal.close()

    # --- Wanted workers -----------------------------------------------------------------------

    def want(self, spec: WorkerSpec, objects: WorkerObjects) -> PodWorker:
        return self._new_worker(
            spec,
            objects,
            pods=tuple(name_of(each) for each in objects.pods),
            claims=tuple(name_of(each) for each in objects.claims),
        )

    def adopt(self, spec: WorkerSpec) -> PodWorker:
        pods = sorted(self.pods.objects_of(spec.worker_id), key=lambda each: each.name)
        claims = tuple(claim for pod in pods for claim in pod.claims)
        worker = self._new_worker(spec, None, pods=tuple(p.name for p in pods), claims=claims)
        self._compare(worker)
        return worker

    def _new_worker(
        self,
        spec: WorkerSpec,
        objects: WorkerObjects | None,
        *,
        pods: tuple[str, ...],
        claims: tuple[str, ...],
    ) -> PodWorker:
        loop = asyncio.get_running_loop()
        worker = self.workers[spec.worker_id] = PodWorker(
            spec=spec,
            objects=objects,
            since=loop.time(),
            running=loop.create_future(),
            pods=pods,
            claims=claims,
        )
        self._claims.use(worker)
        self._touch(spec.worker_id)
        return worker

    def remove_worker(self, worker_id: str, *, grace: int) -> asyncio.Future[None]:
        """Remove a worker, known or not. The future is done when nothing is left."""
        worker = self._unwant(worker_id)
        if worker is not None and worker.failure is None:
            worker.give_up(
                WorkerStartFailed(f"the {worker.spec.kind} was stopped while it started")
            )
        self._touch(worker_id)
        return self._removal.begin(worker_id, grace=grace)

    def fail(self, worker: PodWorker, reason: str, *, crashed: bool = False) -> None:
        if worker.failure is not None:
            return
        worker.give_up((WorkerCrashed if crashed else WorkerStartFailed)(reason))
        self._unwant(worker.worker_id)
        self._touch(worker.worker_id)
        self._removal.begin(worker.worker_id, grace=KILL_GRACE, failed=worker)

    def why_left(self, worker_id: str) -> str:
        """Say why an ending worker is not gone; "" if none of this id ends."""
        if worker_id not in self._removal.endings:
            return ""
        if not self.current:
            return "the API server does not answer"
        return self._removal.why_left(worker_id)

    def unwanted(self) -> set[str]:
        found = {
            each.worker_id
            for view in (self.pods, self.secrets, self.services, self.policies)
            for each in view.objects.values()
        }
        return found - self.workers.keys() - self.kept

    def _unwant(self, worker_id: str) -> PodWorker | None:
        worker = self.workers.pop(worker_id, None)
        if worker is not None:
            self._claims.leave(worker)
            self._turns_changed = True
        return worker

    # --- Changes ------------------------------------------------------------------------------

    def _note_pod(self, before: Pod | None, now: Pod | None) -> None:
        about = now or before
        assert about is not None
        self._removal.note_pod(about, there=now is not None)
        self._turns_changed = True
        self._note(before, now)

    def _note_claim(self, before: Claim | None, now: Claim | None) -> None:
        about = now or before
        assert about is not None
        for worker_id in self._claims.users(about.name):
            self._touch(worker_id)
        self._note(before, now)

    def _note(self, before: Observed | None, now: Observed | None) -> None:
        about = now or before
        assert about is not None
        if now is not None and now.epoch > self._epoch.number and not self._is_superseded:
            self._is_superseded = True
            self._log.error("superseded", epoch=self._epoch.number, newer=now.epoch)
            self._epoch.superseded()
        if worker_id := about.worker_id:
            self._touch(worker_id)

    def _touch(self, worker_id: str) -> None:
        self._dirty.add(worker_id)
        self._wake.set()

    # --- The loop -----------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        ticked = swept = loop.time()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK):
                    await self._wake.wait()
            await asyncio.sleep(_TOGETHER)
            self._wake.clear()
            if self._is_superseded:
                continue
            try:
                if loop.time() - ticked >= _TICK:
                    ticked = loop.time()
                    self._tick()
                if self.sweeps and loop.time() - swept >= _SWEEP:
                    swept = loop.time()
                    self._sweep()
            except Exception:  # noqa: BLE001 - the comparison must go on
                self._log.exception("cluster_not_compared")
            self._compare_changed()

    def _tick(self) -> None:
        """Compare starting, ending and troubled workers again, for their deadlines."""
        self._steps.forget_past()
        if not self.current:
            self._removal.note_gap()
        self._dirty |= self._removal.endings.keys()
        self._dirty |= {w.worker_id for w in self.workers.values() if w.starts or w.says}

    def _sweep(self) -> None:
        self._dirty |= self.unwanted()
        self._claims.delete_idle()

    def _compare_changed(self) -> None:
        if self._turns_changed:
            self._turns_changed = False
            self._dirty |= {w.worker_id for w in self.workers.values() if w.waits_for_turn}
        dirty, self._dirty = self._dirty, set()
        for worker_id in dirty:
            try:
                self._compare_one(worker_id)
            except Exception:  # noqa: BLE001 - the others must go on
                self._log.exception("worker_not_compared", worker_id=worker_id)

    def _compare_one(self, worker_id: str) -> None:
        if (worker := self.workers.get(worker_id)) is not None:
            self._compare(worker)
        elif worker_id in self._removal.endings or (self.sweeps and worker_id not in self.kept):
            self._removal.remove(worker_id, current=self.current)

    # --- One wanted worker --------------------------------------------------------------------

    def _compare(self, worker: PodWorker) -> None:
        pods = {pod.name: pod for pod in self.pods.objects_of(worker.worker_id)}
        if worker.objects is not None:
            for pod in [each for each in pods.values() if each.epoch != self._epoch.number]:
                self._removal.delete_pod(
                    pods.pop(pod.name), KILL_GRACE
                )  # of an earlier gateway, created late
        failure = worker.look(pods, self.claims.objects, self._removal.lost_since, self._deadlines)
        if failure is not None:
            self._fail(worker, failure)
            return
        if worker.stage == "running":
            self._note_running(worker)
        elif worker.objects is not None:
            self._make_missing(worker, worker.objects)
        if worker.prepares_for() > self._deadlines.poll:
            key = ("events", worker.worker_id)
            self._steps.begin(key, partial(self._read_events, worker, key), worker=worker)

    def _note_running(self, worker: PodWorker) -> None:
        address = worker.seen[worker.pods[0]].status.pod_ip
        if address and not worker.running.done():
            worker.objects = None
            worker.running.set_result(self._maker.handle_of(worker.spec, address))

    def _fail(self, worker: PodWorker, failure: PodFailure) -> None:
        if not failure.log_of:
            self.fail(worker, failure.reason, crashed=failure.crashed)
            return
        step = partial(self._examine, worker, failure)
        self._steps.begin(("log", worker.worker_id), step, worker=worker)

    async def _examine(self, worker: PodWorker, failure: PodFailure) -> None:
        text = ""
        with suppress(Refused):
            text = await self._api.log(failure.log_of, container=CONTAINER, lines=_LOG_LINES)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        tail = " | ".join(lines[-_LOG_LINES:]).replace(worker.spec.secret, "(secret)")
        tail = without_paths(tail)[-_LONGEST_TAIL:]
        self.fail(
            worker,
            f"{failure.reason}; the last lines of its log: {tail}" if tail else failure.reason,
        )

    async def _read_events(self, worker: PodWorker, key: Key) -> None:
        self._steps.put_off(key, self._deadlines.poll)
        worker.warn(await self.read_warning(worker.seen.values()))

    async def read_warning(self, pods: Iterable[Pod]) -> str:
        """Return the newest warning in the events of starting pods, or "". Raises `ApiFault`.

        Events explain more than the states of pods."""
        told = ""
        for pod in pods:
            about = f"involvedObject.name={pod.name},involvedObject.uid={pod.metadata.uid}"
            listed = await self._api.list(EVENTS, fields=about)
            told = told or told_by_events([Event.model_validate(each) for each in listed.items])
        return told

    # --- Its objects ----------------------------------------------------------------------------

    def _make_missing(self, worker: PodWorker, objects: WorkerObjects) -> None:
        worker.waits_for_turn, complete = False, True
        for view, body in (
            (self.secrets, objects.secret),
            (self.services, objects.service),
            (self.policies, objects.policy),
        ):
            if body is not None:
                complete &= self._steps.make(worker, view, body)
        for claim in objects.claims:
            complete &= self._claims.make(worker, claim)
        if not complete:
            return
        now = asyncio.get_running_loop().time()
        for pod in objects.pods:
            name, claims = name_of(pod), Pod.model_validate(pod).claims
            if name in worker.seen:
                continue
            if before := self._before_in_pool(worker):
                worker.wait(f"{before}, which has several pods as it has, is to be scheduled first")
            elif before := self._before_on_claims(name, claims):
                worker.says = f"{before}, which shares its claim, is to be scheduled first"
            else:
                for each in claims:
                    worker.asked.setdefault(each, (name, now))
                self._steps.make(worker, self.pods, pod)
                continue
            worker.waits_for_turn = True
            return

    def _before_in_pool(self, worker: PodWorker) -> str:
        """Return the worker before this one, or "".

        Two workers with several pods could each hold some of the last nodes and wait for the rest.
        So only one such worker of a pool has unscheduled pods."""
        if len(worker.pods) == 1:
            return ""
        worker.queued_at = min(worker.queued_at, asyncio.get_running_loop().time())
        pool = pool_name(worker.spec.group)
        first = min(
            (w for w in self.workers.values() if w.is_queued and pool_name(w.spec.group) == pool),
            key=lambda each: each.queued_at,
        )
        return "" if first is worker else first.worker_id

    def _before_on_claims(self, pod: str, claims: Sequence[str]) -> str:
        """Return the pod before this one, or "".

        The scheduler's writes conflict for pods that reach one claim together. So the next pod
        waits until the last was scheduled, for at most `_PATIENCE` seconds."""
        earliest = asyncio.get_running_loop().time() - _PATIENCE
        for claim in claims:
            for user in self._claims.users(claim):
                other, since = self.workers[user].asked.get(claim, (pod, 0.0))
                made = self.pods.objects.get(other)
                done = made is not None and (made.scheduled or made.deleted)
                if other != pod and since > earliest and not done:
                    return other
        return ""
