"""The gateway's objects of one kind, from list and watch.

A broken watch is resumed. All objects are listed again regularly, or if the version is too old.
While the server refuses or is silent, it is asked less and less often."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar

from gateway.workers.launchers.kubernetes.api import (
    Api,
    ApiFault,
    Refused,
    Unanswered,
    WatchEvent,
    jittered,
)
from gateway.workers.launchers.kubernetes.names import Resource
from gateway.workers.launchers.kubernetes.observed import Observed
from gateway.workers.launchers.kubernetes.templates import Object
from tandem.telemetry import get_log

Kind = TypeVar("Kind", bound=Observed)

_PAUSE = 1.0
_LONGEST_PAUSE = 15.0
"""Longest pause, while watches last less than this."""
_LATE = 5.0
"""Seconds for which the end of a watch may be late; then it may be cut off."""


class View(Generic[Kind]):
    """`objects` are by name. `changed` gets the old and the new object or None. `current` is true
    while the server reports changes. `listed` is set after the first list. Lists are repeated every
    `resync` seconds."""

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
        """Names of new objects that a running list may lack."""
        self._resync = resync
        self._changed = changed
        self._pause = _PAUSE
        self._version = ""
        """The version to watch from; "" means that a list comes first."""
        self._list_at = 0.0
        self._log = get_log(resource=resource.plural)

    def objects_of(self, worker_id: str) -> list[Kind]:
        return list(self._indexed.get(worker_id, {}).values())

    def note_made(self, made: Object) -> None:
        """Add a creation's answer before the watch reports it."""
        seen = self._model.model_validate(made)
        if seen.name not in self.objects:
            self._put(seen)
            self._noted.add(seen.name)

    def correct(self, judged: Observed, found: Object | None) -> None:
        """Replace a judged object by a newer answer (None: gone), unless a watch was faster."""
        if self.objects.get(judged.name) is not judged:
            return
        if found is None:
            self._remove(judged.name)
        else:
            self._put(self._model.model_validate(found))
            self._noted.add(judged.name)

    async def follow(self) -> None:
        while True:
            try:
                await self._follow_once()
                continue
            except ApiFault as error:
                asked = error.retry_after if isinstance(error, Unanswered) else 0.0
                if isinstance(error, Refused) and error.status == 410:  # too old: list again
                    self._version = ""
                else:
                    self._log.warning("cluster_not_seen", reason=str(error))
            except Exception:  # noqa: BLE001 - whatever was answered, it is asked again
                self._log.exception("cluster_not_seen")
                asked, self._version = 0.0, ""
            self.current = False
            await asyncio.sleep(max(asked, jittered(self._pause)))
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    async def _follow_once(self) -> None:
        """Watch from the last version until the next list is due. List first if it is due."""
        loop = asyncio.get_running_loop()
        if not self._version or self._list_at - loop.time() <= 1:
            await self._list()
        left, opened = self._list_at - loop.time(), math.inf
        events = self._api.watch(
            self.resource, version=self._version, labels=self.labels, seconds=left
        )
        try:
            async with asyncio.timeout(left + _LATE):
                async for event in events:
                    opened = min(opened, loop.time())
                    self.current = True
                    self._note_event(event)
                    self._version = event.object["metadata"]["resourceVersion"]
        except TimeoutError:
            raise Unanswered("a watch does not end") from None
        finally:
            if loop.time() - opened >= _LONGEST_PAUSE:
                self._pause = _PAUSE
        if loop.time() - opened < _PAUSE:  # a server that closes every watch is not asked faster
            await asyncio.sleep(_PAUSE)

    async def _list(self) -> None:
        self._noted.clear()
        listed = await self._api.list(self.resource, labels=self.labels)
        seen = [self._model.model_validate(each) for each in listed.items]
        for name in self.objects.keys() - {each.name for each in seen} - self._noted:
            self._remove(name)
        for each in seen:
            self._put(each)
        self.current = True
        self.listed.set()
        self._version = listed.version
        self._list_at = asyncio.get_running_loop().time() + self._resync

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
