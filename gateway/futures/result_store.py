"""What becomes of results that nobody has fetched yet: a bounded part of them is in memory.

Each owner's share of memory has its newest results. What is older goes: a sample's to a file,
an operation's altogether, since the operation log has it. Of samples that nobody fetches an
owner keeps so many; older ones are given up, and who asks for one is told to sample again.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections import OrderedDict, defaultdict
from pathlib import Path

from gateway.futures.table import Future, Result
from gateway.metrics import Metrics
from tandem.telemetry import get_log

_SMALL = 2**10
"""A result of up to so many bytes is not worth a file: the bound on their number bounds them."""


class ResultStore:
    """`bytes_in_memory` and `most_samples` are for each owner."""

    def __init__(
        self, *, folder: Path, bytes_in_memory: int, most_samples: int, metrics: Metrics
    ) -> None:
        self._folder = folder
        self._bytes_in_memory = bytes_in_memory
        self._most_samples = most_samples
        self._metrics = metrics
        self._large: defaultdict[str, OrderedDict[str, Future]] = defaultdict(OrderedDict)
        self._bytes: defaultdict[str, int] = defaultdict(int)
        self._samples: defaultdict[str, OrderedDict[str, Future]] = defaultdict(OrderedDict)
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_log()

    @property
    def bytes_held(self) -> int:
        """In memory, of all owners; what is on its way to a file is not counted."""
        return sum(self._bytes.values())

    async def open(self) -> None:
        """Removes what an earlier gateway left, whose samples nobody can ask for."""
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def close(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def keep(self, future: Future, /) -> list[Future]:
        over: list[Future] = []
        if future.source == "sample":
            samples = self._samples[future.owner]
            samples[future.request_id] = future
            if len(samples) > self._most_samples:
                over.append(next(iter(samples.values())))
                self._metrics.results_given_up.inc()
        if isinstance(future.outcome, Result) and future.outcome.size > _SMALL:
            self._large[future.owner][future.request_id] = future
            self._bytes[future.owner] += future.outcome.size
            over += self._make_room(future.owner)
        return over

    def forget(self, future: Future, /) -> None:
        self._samples[future.owner].pop(future.request_id, None)
        self._take_out(future)
        if isinstance(future.outcome, Result) and future.outcome.file is not None:
            self._in_background(future.outcome.file)
        for kept in (self._samples, self._large, self._bytes):
            if not kept.get(future.owner):
                kept.pop(future.owner, None)

    def _make_room(self, owner: str) -> list[Future]:
        """Those of operations that are dropped; samples are on their way to their files."""
        over = []
        while self._bytes[owner] > self._bytes_in_memory and self._large[owner]:
            oldest = next(iter(self._large[owner].values()))
            self._take_out(oldest)
            if oldest.source == "operation":
                over.append(oldest)
            else:
                self._spill(oldest)
        return over

    def _take_out(self, future: Future) -> None:
        found = self._large[future.owner].pop(future.request_id, None)
        if found is not None and isinstance(found.outcome, Result):
            self._bytes[future.owner] -= found.outcome.size

    def _spill(self, future: Future) -> None:
        task = asyncio.create_task(self._write(future))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, future: Future) -> None:
        assert isinstance(future.outcome, Result)
        body = future.outcome.body
        name = hashlib.sha256(future.request_id.encode()).hexdigest()
        file = self._folder / name[:2] / name

        def write() -> None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(body)

        try:
            await asyncio.to_thread(write)
        except OSError as error:  # it stays in memory, which is better than not at all
            self._log.error("result_not_written", reason=str(error))
            return
        self._metrics.spilled_bytes.inc(len(body))
        future.move_to(file)
        if future.request_id not in self._samples.get(future.owner, ()):  # fetched meanwhile
            self._in_background(file)

    def _in_background(self, file: Path) -> None:
        task = asyncio.create_task(asyncio.to_thread(file.unlink, missing_ok=True))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
