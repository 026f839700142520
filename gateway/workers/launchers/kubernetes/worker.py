"""A wanted worker, its progress and its deadlines."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gateway.workers.launchers.kubernetes.names import CONTAINER
from gateway.workers.launchers.kubernetes.objects import WorkerObjects
from gateway.workers.launchers.kubernetes.observed import Pod
from gateway.workers.launchers.kubernetes.pods import (
    PodState,
    state_of,
    why_deleted,
    why_lost,
)
from tandem.errors import WorkerStartFailed
from tandem.protocol.worker import WorkerHandle, WorkerSpec

Stage = Literal["making", "scheduling", "preparing", "running"]


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds: until a pod is scheduled, until it then runs, for a lost node, and between reads of
    a starting pod's events."""

    pending: float
    pull: float
    node_lost: float
    poll: float


@dataclass(frozen=True)
class PodFailure:
    """Why a worker will never serve (again). `log_of` is a pod with a useful log."""

    reason: str
    crashed: bool = False
    log_of: str = ""


@dataclass(eq=False, kw_only=True)
class PodWorker:
    """`objects` exist while it starts, None if adopted. `running` has its handle when all
    containers run, or the reason why they never will. `failure` is why it will never serve (again).
    `seen` are its pods as last seen. `says` is its reason for waiting. Times are event loop times.
    """

    spec: WorkerSpec
    objects: WorkerObjects | None
    pods: tuple[str, ...]
    claims: tuple[str, ...]
    running: asyncio.Future[WorkerHandle]
    since: float
    stage: Stage = "making"
    says: str = ""
    seen: dict[str, Pod] = field(default_factory=dict)
    failure: WorkerStartFailed | None = None
    queued_at: float = math.inf
    """When it began to wait for its turn in its pool, if it has several pods."""
    waits_for_turn: bool = False
    asked: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By claim: its pod, and when its creation began."""
    _warning: str = ""
    _warned_at: float = 0.0

    @property
    def worker_id(self) -> str:
        return self.spec.worker_id

    def look(
        self,
        pods: Mapping[str, Pod],
        claims: Mapping[str, object],
        lost_since: Mapping[str, float],
        deadlines: Deadlines,
    ) -> PodFailure | None:
        """Note its progress and return its failure, if any. `lost_since` has, by pod uid, the time
        when its node was lost."""
        now = asyncio.get_running_loop().time()
        for name in self.pods:
            if (pod := pods.get(name)) is not None:
                self.seen[name] = pod
            elif name in self.seen:
                return self._ended(self.seen[name], self._state_of(self.seen[name]))
        states = [self._state_of(pod) for pod in self.seen.values()]
        both = [*zip(self.seen.values(), states, strict=True)]
        if ended := [each for each in both if each[1].stage == "ended"]:
            return self._ended(*max(ended, key=lambda each: each[1].from_outside))
        for pod, state in both:
            if pod.deleted and state.stage != "running":  # it never will
                return PodFailure(why_deleted(pod, kind=self.spec.kind))
            if state.hopeless:
                return PodFailure(f"the {self.spec.kind} cannot start: {state.says}")
        for pod in self.seen.values():
            if (since := lost_since.get(pod.metadata.uid)) is not None:
                if self._all_run(states):  # so the next gateway takes it up
                    self._enter("running", now)
                self.says = why_lost(pod)
                if now - since < deadlines.node_lost:
                    return None
                return PodFailure(f"the {self.spec.kind} was lost: {self.says}")
        return self._advance(states, claims, deadlines, now)

    def give_up(self, failure: WorkerStartFailed) -> None:
        self.failure = failure
        if not self.running.done():
            self.running.set_exception(failure)
            self.running.exception()  # perhaps nobody waits for it

    def warn(self, told: str) -> None:
        if told and not self._warning:
            self._warned_at = asyncio.get_running_loop().time()
        self._warning = told

    def wait(self, why: str) -> None:
        """Note that it waits for other workers, which stops its clock."""
        self.says, self.since = why, asyncio.get_running_loop().time()

    @property
    def starts(self) -> bool:
        return self.objects is not None

    @property
    def is_queued(self) -> bool:
        """Whether it has its turn in its pool, or waits for it."""
        scheduled = all(name in self.seen and self.seen[name].scheduled for name in self.pods)
        return self.queued_at < math.inf and not scheduled

    def prepares_for(self) -> float:
        """Return the seconds since its pods were scheduled, while they do not run."""
        if self.stage != "preparing":
            return 0.0
        return asyncio.get_running_loop().time() - self.since

    def _state_of(self, pod: Pod) -> PodState:
        return state_of(pod, kind=self.spec.kind, container=CONTAINER)

    def _ended(self, pod: Pod, state: PodState) -> PodFailure:
        if state.stage != "ended" or (pod.deleted and not state.explained):
            return PodFailure(why_deleted(pod, kind=self.spec.kind))
        return PodFailure(state.says, state.crashed, log_of="" if state.explained else pod.name)

    def _advance(
        self,
        states: list[PodState],
        claims: Mapping[str, object],
        deadlines: Deadlines,
        now: float,
    ) -> PodFailure | None:
        if self._all_run(states):
            self._enter("running", now)
            self.says = ""
            return None
        slow = min(
            (state for state in states if state.stage != "running"),
            key=lambda state: state.stage != "unscheduled",
            default=None,
        )
        if slow is None:  # the creator explains missing pods
            self._enter("making", now)
        elif slow.stage == "unscheduled":
            self._enter("scheduling", now)
            missing = next((each for each in self.claims if each not in claims), "")
            self.says = f"its claim {missing} is missing" if missing else slow.says
        else:
            self._enter("preparing", now)
            if slow.stage == "preparing":
                self.says = self._warning or slow.says
            elif slow.explained or not self.says:
                self.says = slow.says
        return self._too_slow(deadlines, now)

    def _all_run(self, states: list[PodState]) -> bool:
        complete = len(states) == len(self.pods)
        return complete and all(state.stage == "running" for state in states)

    def _enter(self, stage: Stage, now: float) -> None:
        if self.stage != stage:
            self.stage, self.since, self._warning, self.says = stage, now, "", ""

    def _too_slow(self, deadlines: Deadlines, now: float) -> PodFailure | None:
        since, limit = self.since, deadlines.pending
        setting = " (TANDEM_KUBERNETES_PENDING_TIMEOUT)"
        what = "could not be made" if self.stage == "making" else "was not scheduled"
        if self.stage == "preparing":
            what = "did not run"
            if self._warning:
                since = self._warned_at
            else:
                limit, setting = deadlines.pull, ""
        if now - since <= limit:
            return None
        return PodFailure(
            f"the {self.spec.kind}'s pod {what} within {limit:g} s{setting}: {self.says}"
        )
