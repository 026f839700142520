"""Single steps on the cluster's objects: create, adopt, delete.

A step in progress or just failed is not started again. A creation without an answer stays uncertain
until its outcome is known."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

from gateway.workers.launchers.kubernetes.api import Api, Refused, Unanswered
from gateway.workers.launchers.kubernetes.names import (
    CLAIMS,
    GROUP,
    INSTANCE,
    PODS,
    WORKER,
    Resource,
)
from gateway.workers.launchers.kubernetes.observed import Claim, Observed, Pod
from gateway.workers.launchers.kubernetes.templates import Object
from gateway.workers.launchers.kubernetes.view import View
from gateway.workers.launchers.kubernetes.worker import PodWorker
from tandem.errors import without_paths
from tandem.telemetry import get_log

AnyView: TypeAlias = "View[Pod] | View[Claim] | View[Observed]"
Key: TypeAlias = tuple[str, str]
"""A resource's plural, and a name."""

_AGAIN = 2.0
_LONG_AGAIN = 10.0


class Steps:
    """`done` gets the worker id of each finished step. `fail` gets a worker that cannot be created,
    with the reason."""

    def __init__(
        self,
        api: Api,
        *,
        epoch: int,
        done: Callable[[str], None],
        fail: Callable[[PodWorker, str], None],
    ) -> None:
        self._api = api
        self._epoch = epoch
        self._done = done
        self._fail = fail
        self._under_way: dict[Key, asyncio.Task[None]] = {}
        self._not_before: dict[Key, float] = {}
        self._uncertain: defaultdict[str, dict[Key, AnyView]] = defaultdict(dict)
        self._log = get_log()

    async def close(self) -> None:
        tasks = tuple(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def begin(
        self, key: Key, step: Callable[[], Awaitable[None]], *, worker: PodWorker | str
    ) -> None:
        """Start a step for a worker, or for the remains of a worker id."""
        now = asyncio.get_running_loop().time()
        if key not in self._under_way and now >= self._not_before.get(key, 0.0):
            task = asyncio.create_task(self._carry_out(key, step, worker))
            self._under_way[key] = task

    def put_off(self, key: Key, seconds: float) -> None:
        self._not_before[key] = asyncio.get_running_loop().time() + seconds

    def forget_past(self) -> None:
        now = asyncio.get_running_loop().time()
        self._not_before = {key: at for key, at in self._not_before.items() if at > now}

    async def _carry_out(
        self, key: Key, step: Callable[[], Awaitable[None]], worker: PodWorker | str
    ) -> None:
        said = ""
        try:
            await step()
        except Unanswered as error:
            self.put_off(key, _AGAIN)
            said = str(error)
        except Refused as error:
            self.put_off(key, _LONG_AGAIN if error.status == 403 else _AGAIN)
            said = f"the cluster refuses {'/'.join(key)}: {error}"
            self._log.error("cluster_refuses", what="/".join(key), reason=str(error))
        except Exception:  # noqa: BLE001 - it is tried again, as after any other fault
            self.put_off(key, _LONG_AGAIN)
            self._log.exception("step_failed", what="/".join(key))
        finally:
            del self._under_way[key]
            if isinstance(worker, PodWorker):
                worker.says = without_paths(said) or worker.says
                worker = worker.worker_id
            self._done(worker)

    # --- Making -------------------------------------------------------------------------------

    def make(self, worker: PodWorker, view: AnyView, body: Object) -> bool:
        """Return whether an object exists, and start to create it otherwise."""
        name = name_of(body)
        there = view.objects.get(name)
        if there is None:
            step = partial(self._create, worker, view, body)
            self.begin((view.resource.plural, name), step, worker=worker)
        elif there.deleted:
            worker.says = _not_gone(view.resource, name)
        elif view.resource is CLAIMS or there.epoch == self._epoch:
            return True
        else:  # of an earlier gateway, created late
            self.delete(view, there, worker=worker)
        return False

    async def _create(self, worker: PodWorker, view: AnyView, body: Object) -> None:
        resource, name = view.resource, name_of(body)
        key = (resource.plural, name)
        uncertain = self._uncertain[worker.worker_id]
        if resource is not CLAIMS:
            uncertain[key] = view
        try:
            made = await self._api.create(resource, body)
        except Refused as error:
            if error.reason == "AlreadyExists":
                made = await self._take(worker, resource, body)
            elif error.status == 409 or "exceeded quota" in str(error):
                # A quota changed meanwhile or is full. Others may make room.
                raise
            else:
                said = f"the cluster refuses its {resource.kind}: {without_paths(str(error))}"
                self._fail(worker, f"the {worker.spec.kind} cannot start: {said}")
                made = {}
            uncertain.pop(key, None)
        uncertain.pop(key, None)
        if made:
            view.note_made(made)

    async def _take(self, worker: PodWorker, resource: Resource, body: Object) -> Object:
        """Return an existing object if a lost creation made it, else {}."""
        name = name_of(body)
        there = await self._api.find(resource, name)
        if there is None:
            return {}
        found, wanted = Observed.model_validate(there), Observed.model_validate(body)
        if any(
            found.metadata.labels.get(label) != wanted.metadata.labels.get(label)
            for label in (INSTANCE, WORKER, GROUP)
        ):
            said = f"there is a {resource.kind} {name} that is not its own"
            self._fail(worker, f"the {worker.spec.kind} cannot start: {said}")
            return {}
        if found.deleted:
            raise Unanswered(_not_gone(resource, name))
        return there

    # --- Deleting -----------------------------------------------------------------------------

    def deletes(self, view: AnyView, name: str) -> bool:
        """Return whether an object is being deleted, or just was and the view does not show
        it yet."""
        key = (view.resource.plural, name)
        return key in self._under_way or key in self._not_before

    def delete(
        self, view: AnyView, one: Observed, *, worker: PodWorker | str, grace: int | None = None
    ) -> None:
        """Start to delete an object, once until the view can show it. A changed pod or claim stays,
        because a newer gateway may own the pod, or the claim may be in use."""
        key = (view.resource.plural, one.name)

        async def delete() -> None:
            resource, seen = view.resource, one.metadata
            version = seen.resource_version if resource in (PODS, CLAIMS) else ""
            try:
                await self._api.delete(
                    resource, one.name, uid=seen.uid, version=version, grace=grace
                )
            except Refused as error:
                if error.status not in (404, 409):
                    raise
                found = await self._api.find(resource, one.name)
                if found is not None and Observed.model_validate(found).metadata == seen:
                    raise  # something else prevents it
                view.correct(one, found)
            else:
                self.put_off(key, _AGAIN)

        self.begin(key, delete, worker=worker)

    def is_certain(self, worker_id: str) -> bool:
        """Return whether all creations for a worker have a known outcome, and find out about the
        others."""
        for key, view in tuple(self._uncertain.get(worker_id, {}).items()):
            self.begin(key, partial(self._find_out, worker_id, key, view), worker=worker_id)
        if self._uncertain.get(worker_id):
            return False
        self._uncertain.pop(worker_id, None)
        return True

    async def _find_out(self, worker_id: str, key: Key, view: AnyView) -> None:
        there = await self._api.find(view.resource, key[1])
        if there is not None and Observed.model_validate(there).worker_id == worker_id:
            view.note_made(there)
        self._uncertain[worker_id].pop(key, None)


def name_of(body: Object) -> str:
    name: str = body["metadata"]["name"]
    return name


def _not_gone(resource: Resource, name: str) -> str:
    return f"{resource.kind} {name} of an earlier time is not gone yet"
