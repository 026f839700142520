"""The gateway's objects of one kind, as list and watch show them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar

from gateway.workers.launchers.kubernetes.api import (
    Api,
    ApiFault,
    Refused,
    Resource,
    Unanswered,
    WatchEvent,
)
from gateway.workers.launchers.kubernetes.observed import Observed
from gateway.workers.launchers.kubernetes.templates import Object
from tandem.telemetry import get_log

Kind = TypeVar("Kind", bound=Observed)

_PAUSE = 1.0
_LONGEST_PAUSE = 15.0
"""Between lists, while no watch lasts as long as that."""
_LATE = 5.0
"""Seconds by which the end of a watch may be late: one that brings nothing may be cut off."""


class View(Generic[Kind]):
    """`objects` are by name, and `changed` is called with what was and what is; None: nothing.
    `current` while the API server tells what changes; `listed` is set once it has told all.
    Everything is listed anew every `resync` seconds."""

    def __init__(
        self,
        api: Api,
        resource: Resource,
        model: type[Kind],
        *,
        labels: str,
        resync: float,
        changed: Callable[[Kind | None, Kind | None], None],
    ) -> None:
        self.resource = resource
        self.objects: dict[str, Kind] = {}
        self.current = False
        self.listed = asyncio.Event()
        self._api = api
        self._model = model
        self.labels = labels
        self._indexed: defaultdict[str, dict[str, Kind]] = defaultdict(dict)
        self._noted: set[str] = set()
        """Names of what was made since the list was asked for, which may not have it."""
        self._resync = resync
        self._changed = changed
        self._pause = _PAUSE
        self._log = get_log(resource=resource.plural)

    def of(self, worker_id: str) -> list[Kind]:
        """Return the objects of a worker."""
        return list(self._indexed.get(worker_id, {}).values())

    def note(self, made: Object) -> None:
        """Take what a creation answered, before the watch tells it."""
        seen = self._model.model_validate(made)
        if seen.name not in self.objects:
            self._put(seen)
            self._noted.add(seen.name)

    def forget(self, name: str, *, uid: str) -> None:
        """Take it that an object is gone, which the API server has said."""
        self._remove(name, uid=uid)

    async def follow(self) -> None:
        """Follow for ever."""
        while True:
            try:
                await self._follow_once()
                continue
            except ApiFault as error:
                if not (isinstance(error, Refused) and error.status == 410):  # too old: list anew
                    self._log.warning("cluster_not_seen", reason=str(error))
                    self.current = False
            except Exception:  # noqa: BLE001 - whatever was answered, it is asked again
                self._log.exception("cluster_not_seen")
                self.current = False
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    async def _follow_once(self) -> None:
        """List, and watch until it is time to list again."""
        loop = asyncio.get_running_loop()
        self._noted.clear()
        listed = await self._api.list(self.resource, labels=self.labels)
        seen = [self._model.model_validate(each) for each in listed.items]
        for name in self.objects.keys() - {each.name for each in seen} - self._noted:
            self._remove(name)
        for each in seen:
            self._put(each)
        self.current = True
        self.listed.set()
        version, until = listed.version, loop.time() + self._resync
        while (left := until - loop.time()) > 1:
            began = loop.time()
            events = self._api.watch(
                self.resource, version=version, labels=self.labels, seconds=left
            )
            try:
                async with asyncio.timeout(left + _LATE):
                    async for event in events:
                        version = event.object["metadata"]["resourceVersion"]
                        self._note_event(event)
            except TimeoutError:
                raise Unanswered("a watch does not end") from None
            finally:
                if loop.time() - began >= _LONGEST_PAUSE:
                    self._pause = _PAUSE
            if loop.time() - began < _PAUSE:  # a server that closes every watch is asked no faster
                await asyncio.sleep(_PAUSE)

    def _note_event(self, event: WatchEvent) -> None:
        if event.type == "BOOKMARK":
            return
        one = self._model.model_validate(event.object)
        if event.type == "DELETED":
            self._remove(one.name, uid=one.metadata.uid)
        else:
            self._put(one)

    def _put(self, one: Kind) -> None:
        before = self.objects.get(one.name)
        if before == one:
            return
        if before is not None and before.metadata.uid != one.metadata.uid:
            self._remove(one.name)
            before = None
        self.objects[one.name] = one
        self._indexed[one.worker_id][one.name] = one
        self._changed(before, one)

    def _remove(self, name: str, *, uid: str = "") -> None:
        before = self.objects.get(name)
        if before is None or (uid and before.metadata.uid != uid):
            return
        del self.objects[name]
        worker_id = before.worker_id
        self._indexed[worker_id].pop(name)
        if not self._indexed[worker_id]:
            del self._indexed[worker_id]
        self._changed(before, None)
