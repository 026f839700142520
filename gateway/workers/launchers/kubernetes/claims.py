"""The claims of device groups. A claim exists from before its first pod until a time without
use."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

from gateway.workers.launchers.kubernetes.names import GROUP, GROUP_SPEC
from gateway.workers.launchers.kubernetes.observed import Claim, Pod
from gateway.workers.launchers.kubernetes.steps import Steps, name_of
from gateway.workers.launchers.kubernetes.templates import Object
from gateway.workers.launchers.kubernetes.view import View
from gateway.workers.launchers.kubernetes.worker import PodWorker


class Claims:
    """`idle_seconds` returns the lifetime of a group's unused claim."""

    def __init__(
        self,
        steps: Steps,
        view: View[Claim],
        *,
        pods: View[Pod],
        idle_seconds: Callable[[str], float],
    ) -> None:
        self._steps = steps
        self._view = view
        self._pods = pods
        self._idle_seconds = idle_seconds
        self._users: defaultdict[str, set[str]] = defaultdict(set)
        """By claim, the wanted workers that name it."""
        self._idle_since: dict[str, float] = {}

    def users(self, name: str) -> set[str]:
        return self._users.get(name, set())

    def use(self, worker: PodWorker) -> None:
        for claim in worker.claims:
            self._users[claim].add(worker.worker_id)

    def leave(self, worker: PodWorker) -> None:
        for claim in worker.claims:
            self._users[claim].discard(worker.worker_id)

    def make(self, worker: PodWorker, body: Object) -> bool:
        """Return whether a claim exists, and start to create it otherwise. An unused claim with an
        old pool setting, or another sharing, is replaced."""
        claim = self._view.objects.get(name_of(body))
        if claim is None or claim.deleted:
            return self._steps.make(worker, self._view, body)
        if self._steps.deletes(self._view, claim.name):
            worker.says = f"its claim {claim.name} is made anew"
            return False
        digest = body["metadata"].get("annotations", {}).get(GROUP_SPEC, "")
        if claim.metadata.annotations.get(GROUP_SPEC, "") == digest:
            return True
        if worker.seen or self.users(claim.name) - {worker.worker_id}:
            return True  # it stays until they have ended
        if claim.status.reserved_for:
            worker.says = f"pods that have ended hold its claim {claim.name}"
            return False
        self._steps.delete(self._view, claim, worker=worker)
        return False

    def delete_idle(self) -> None:
        now = asyncio.get_running_loop().time()
        held = {claim for pod in self._pods.objects.values() for claim in pod.claims}
        for name, claim in self._view.objects.items():
            used = name in held or self.users(name) or claim.status.reserved_for
            if claim.deleted or used:
                self._idle_since.pop(name, None)
                continue
            since = self._idle_since.setdefault(name, now)
            if now - since >= self._idle_seconds(claim.metadata.labels.get(GROUP, "")):
                self._steps.delete(self._view, claim, worker="")
        for name in self._idle_since.keys() - self._view.objects.keys():
            del self._idle_since[name]
