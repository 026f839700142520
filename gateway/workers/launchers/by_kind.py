"""`LauncherByKind` starts trainers and samplers through different agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from gateway.workers.launchers.agent import AgentLauncher
from gateway.workers.needs import with_needs
from tandem.agent.host import Host
from tandem.protocol.worker import WorkerDetails, WorkerExit, WorkerHandle, WorkerKind, WorkerSpec


@dataclass(eq=False)
class LauncherByKind:
    """Implements `Launcher` with one launcher per kind of worker."""

    by_kind: Mapping[WorkerKind, AgentLauncher]

    prepare = staticmethod(with_needs)

    @property
    def reports(self) -> bool:
        return all(each.reports for each in self.by_kind.values())

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        return await self.by_kind[spec.kind].start(spec)

    async def wait_ready(self, worker_id: str) -> None:
        await self._of(worker_id).wait_ready(worker_id)

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        await self._of(worker_id).stop(worker_id, at_once=at_once)

    async def suspend(self, worker_id: str, *, lease: int, timeout: float) -> None:
        await self._of(worker_id).suspend(worker_id, lease=lease, timeout=timeout)

    async def resume(self, worker_id: str, *, lease: int, timeout: float) -> None:
        await self._of(worker_id).resume(worker_id, lease=lease, timeout=timeout)

    async def list(self) -> list[WorkerHandle]:
        found = await asyncio.gather(*(each.list() for each in self.by_kind.values()))
        return [handle for handles in found for handle in handles]

    async def describe_host(self) -> Host:
        """Describe the trainers' host, which is also the samplers'."""
        return await self.by_kind["trainer"].describe_host()

    def describe(self, worker_id: str) -> WorkerDetails:
        return self._of(worker_id).describe(worker_id)

    def explain(self, worker_id: str) -> str:
        return self._of(worker_id).explain(worker_id)

    def watch(self) -> AsyncIterator[WorkerExit]:
        """Merge the launchers' exits. Each registers its watcher at once, so no exit is lost."""
        return _merged([each.watch() for each in self.by_kind.values()])

    async def close(self, *, leaving: bool = False) -> None:
        await asyncio.gather(*(each.close(leaving=leaving) for each in self.by_kind.values()))

    def _of(self, worker_id: str) -> AgentLauncher:
        return self.by_kind[cast(WorkerKind, worker_id.partition("-")[0])]


async def _merged(watches: Sequence[AsyncIterator[WorkerExit]]) -> AsyncIterator[WorkerExit]:
    exits: asyncio.Queue[WorkerExit | None] = asyncio.Queue()

    async def pass_on(watch: AsyncIterator[WorkerExit]) -> None:
        async for exit_ in watch:
            exits.put_nowait(exit_)
        exits.put_nowait(None)

    tasks = [asyncio.create_task(pass_on(watch), name="agent-exits") for watch in watches]
    try:
        for _ in tasks:
            while (exit_ := await exits.get()) is not None:
                yield exit_
    finally:
        for task in tasks:
            task.cancel()
