"""The router of samplers in virtual time, with model engines of two gateways."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import grpc.aio

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.checkpoints.pins import Pins
from gateway.metrics import Metrics
from gateway.owners.limits import Quotas
from gateway.owners.sessions.registry import Session
from gateway.owners.usage.meter import SampleMeter
from gateway.sampling.router import SamplerRouter
from gateway.sampling.sampler import Sampler, SamplerKey
from gateway.storage.futures.table import Future, Result
from gateway.workers.declared_groups import budgets_of, groups_of
from gateway.workers.engine_adapter import EngineAdapter
from gateway.workers.epoch import Epoch
from gateway.workers.groups import WorkerGroup
from gateway.workers.launchers.base import for_each_kind
from gateway.workers.needs import with_needs
from gateway.workers.placing import ENGINE_QUANTUM
from gateway.workers.processes import Processes
from gateway.workers.request_maker import RequestMaker, engine_key
from gateway.workers.requests import WorkerRequest
from gateway.workers.roster import Roster
from gateway.workers.supervisor import Supervisor
from gateway.workers.table import State, WorkerRow
from tandem.agent.host import Host
from tandem.errors import SessionFinished
from tandem.protocol.worker import WorkerSpec
from tandem.settings.gateway import GatewaySettings
from tandem.settings.workers import SamplerSettings
from tandem.v1 import common_pb2, sampler_pb2
from tandem.weights import Manifest
from tests.support.gateway.memory_table import MemoryTable
from tests.support.gateway.model_host import ModelHost, ModelLauncher
from tests.support.gateway.model_workers import Misfortune, ModelSampler
from tests.support.virtual_time import run_in_virtual_time

LOAD_TIMEOUT = 1000.0
PATIENCE = 10_000.0
"""Virtual seconds."""


HOST = Host("host", cores=(0, 1), memory_bytes=64 * 2**30)
WHOLE_MACHINE = groups_of(GatewaySettings(), HOST)
"""The groups of an undeclared machine."""
ONE_PLACE = (
    WorkerGroup(
        name="one",
        kinds=frozenset({"trainer", "engine"}),
        awake=0,
        workers=1,
        on_host=True,
    ),
)
"""A group for one engine."""
TURNS = (replace(ONE_PLACE[0], devices=("cpu:0",), awake=1, workers=9),)
"""A group whose engines take turns."""


class AtOnce(Misfortune):
    """No faults and no delays."""

    async def delay(self, most: float) -> None:
        await asyncio.sleep(0)


class World:
    """A host with engines of an earlier gateway, and the next gateway's router.

    It knows the model `tiny` and the sessions s-1 and s-2, which want `replicas` engines.
    `implicit` has no client."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        *,
        replicas: int = 1,
        groups: Sequence[WorkerGroup] = WHOLE_MACHINE,
        starts: int = 0,
    ) -> None:
        self.quantum = settings.pop("engine_quantum", ENGINE_QUANTUM)
        self.starts = starts
        self.folder = folder
        self.groups = groups
        self.host = ModelHost(AtOnce(random.Random(1)))
        self.pins = Pins()
        self.numbers = count()
        self.sessions = {
            name: Session(
                name,
                0.0,
                None,
                "ann",
                sdk_version="" if name == "implicit" else "0.38",
                user_metadata={"tandem.replicas": replicas},
            )
            for name in ("s-1", "s-2", "implicit")
        }
        settings = {"sharing": {"lora_runs": "never"}} | settings  # each session has an engine
        self.settings = GatewaySettings(data_dir=folder, operation_timeout=LOAD_TIMEOUT, **settings)
        usage: Any = SimpleNamespace(record=lambda *_args, **_more: None)
        metrics = Metrics()
        models: Any = SimpleNamespace(
            all=lambda: [self.model], note_longest=lambda _name, _length: None
        )
        sessions: Any = SimpleNamespace(get=self.sessions.get, require=self.sessions.__getitem__)
        sessions.count_of = lambda _owner, ids: len(list(ids))
        sessions.set_engine_range = self.set_engine_range
        self.launcher = ModelLauncher(self.host)
        self.processes = Processes(
            settings=self.settings,
            launchers=for_each_kind(self.launcher),
            metrics=metrics,
            epoch=Epoch(number=1, superseded=lambda: None),
        )
        self.table = MemoryTable()
        self.adapter = EngineAdapter(self.processes)
        self._about = (usage, metrics, models, sessions)
        self.sampled: list[tuple[str, str, int]] = []

    def _make_router(self) -> None:
        usage, metrics, models, sessions = self._about
        self.supervisor = Supervisor(
            Roster(
                table=self.table,
                adapters={"engine": self.adapter},
                settings=self.settings.sharing,
                epoch=1,
                clock=asyncio.get_running_loop().time,
            )
        )
        budgets = budgets_of(self.settings, HOST)
        starts = self.starts or budgets.starts
        self.supervisor.declare(self.groups, replace(budgets, starts=starts))
        requests = RequestMaker(
            settings=self.settings, groups=lambda: tuple(self.groups), prepare=with_needs
        )
        self.router = SamplerRouter(
            settings=self.settings,
            supervisor=self.supervisor,
            adapter=self.adapter,
            processes=self.processes,
            requests=requests,
            metrics=metrics,
            meter=SampleMeter(usage=usage),
            pins=self.pins,
            models=models,
            sessions=sessions,
            limits=Quotas(settings=self.settings.limit, metrics=metrics),
        )

    async def set_engine_range(
        self, session_ids: set[str], sampler: str, allowed: Sequence[int] | None
    ) -> None:
        for each in session_ids & self.sessions.keys():
            self.sessions[each].engine_ranges = {sampler: allowed}

    @property
    def model(self) -> BaseModelEntry:
        return BaseModelEntry(name="tiny", path=str(self.folder / "tiny"), max_length=None)

    def version(self, name: str) -> common_pb2.WeightVersion:
        if name == "base":
            return common_pb2.WeightVersion(name="base/tiny", path=self.model.path)
        folder, run_id = self.folder / name, "s-1:train:0"
        folder.mkdir(exist_ok=True)
        manifest = Manifest(
            version=f"{run_id}/{name}",
            run_id=run_id,
            step=1,
            dtype="float32",
            tensors=0,
            created="2026-01-01T00:00:00+00:00",
            files=[],
        )
        (folder / "manifest.json").write_text(manifest.model_dump_json())
        return common_pb2.WeightVersion(name=f"{run_id}/{name}", path=str(folder), run_id=run_id)

    def left(
        self,
        name: str = "sampler-s-1-0",
        *,
        session_id: str = "s-1",
        rank: int = 0,
        path: str = "",
        replica: int = 0,
        state: State = "awake",
    ) -> ModelSampler:
        """Add an engine of the earlier gateway, with the base model."""
        spec = WorkerSpec(
            worker_id=name,
            kind="sampler",
            secret="a secret",
            model_name="tiny",
            model_path=path or self.model.path,
            session_id=session_id,
            replica=replica,
            sampler=SamplerSettings(max_lora_rank=rank),
        )
        sampler = str(SamplerKey(session_id, "tiny", rank))
        request = WorkerRequest(
            key=engine_key(sampler, replica),
            kind="engine",
            owner="ann",
            session=session_id,
            model=spec.model_path,
            sampler=sampler,
        )
        self.table.rows[request.key] = WorkerRow(
            request=request,
            group=self.groups[min(replica, len(self.groups) - 1)].name,
            state=state,
            token=1,
            process=name,
            holders=(sampler,),
        )
        engine = self.host.workers[name] = ModelSampler(spec, self.host.misfortune)
        return engine

    async def open_host(self) -> None:
        self._make_router()
        await self.processes.find_processes(self.supervisor)
        await self.supervisor.open()

    async def open(self) -> None:
        await self.open_host()
        await self.router.take_up_engines(self.sampled)
        await self.supervisor.settle(self.router.keys())

    def sampler(self, session_id: str = "s-1", *, rank: int = 0) -> Sampler:
        return self.router.ensure(session_id=session_id, model=self.model, rank=rank)

    async def sample(
        self,
        version: str = "v1",
        *,
        session_id: str = "s-1",
        owner: str = "ann",
        prompt: bytes = b"",
        samples: int = 1,
        in_flight: bool = False,
        updates: sampler_pb2.Updates = sampler_pb2.UPDATES_DEFAULT,
    ) -> str:
        """Return the result, or the type of its error."""
        sampler = self.sampler(session_id)
        request = sampler_pb2.SampleRequest(
            operation_id=f"s-{next(self.numbers)}",
            version=self.version(version),
            prompt_tokens=prompt,
            num_samples=samples,
            in_flight=in_flight,
            updates=updates,
        )
        request.params.seed, request.params.temperature = 7, 1.0
        future = Future(
            request_id=request.operation_id, source="sample", describe=lambda: None, owner=owner
        )
        self.router.submit(sampler, future=future, request=request, check=lambda _version: None)
        async with asyncio.timeout(PATIENCE):
            await future.done
        outcome = future.outcome
        return outcome.body.decode() if isinstance(outcome, Result) else outcome.type

    def running(self) -> list[str]:
        return sorted(self.host.workers)

    def run(self, scenario: Coroutine[None, None, None]) -> None:
        """Run it in virtual time. All sessions end, and nothing may be left."""

        async def run() -> None:
            processes, channel = count(), self.launcher.channel
            numbers = SimpleNamespace(token_hex=lambda _size: str(next(processes)))
            with (
                patch.object(grpc.aio, "insecure_channel", channel),
                patch("gateway.workers.adapters.secrets", numbers),
                patch("gateway.workers.placing.ENGINE_QUANTUM", self.quantum),
            ):
                await scenario
                for session_id in self.sessions:
                    await self.router.end_session(session_id, SessionFinished("over"))
            assert self.running() == []
            assert self.processes.list_records() == []
            assert {folder for folder in self.pins.folders() if "/base/" not in folder} == set()
            assert not self.table.rows
            await self.supervisor.close()

        run_in_virtual_time(run())
