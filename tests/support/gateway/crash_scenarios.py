"""Scenarios of a training run with a gateway that is killed repeatedly.

The gateway is real, on a real SQLite database, in virtual time. Workers and clients are models
(`model_workers`, `crash_client`). A killed gateway leaves its database and files to the next one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import grpc.aio
import structlog
from sqlalchemy import Engine, create_engine, event, select
from sqlalchemy.engine.interfaces import DBAPIConnection

from gateway.core import Gateway
from gateway.metrics import Metrics
from gateway.runs.stopping import Stop
from gateway.storage.data_directory import write_file
from gateway.storage.database import Database
from gateway.storage.tables import (
    checkpoints,
    operations,
    runs,
    snapshots,
    training_steps,
    workers,
)
from gateway.workers.epoch import Epoch
from gateway.workers.launchers.base import for_each_kind
from tandem.protocol.worker import LoraSpec, TrainingSpec
from tandem.settings.gateway import GatewaySettings
from tests.support.crashing_loop import Clock, Crash, CrashingLoop
from tests.support.gateway.constants import changed
from tests.support.gateway.crash_client import Client, Script
from tests.support.gateway.model_host import ModelHost, ModelLauncher
from tests.support.gateway.model_workers import Misfortune
from tests.support.gateway.running import make_model

DEADLINE = 3 * 3600.0
"""A client's limit in the life of one gateway, in virtual seconds."""


def untimed(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the metrics of a step without its seconds, which differ from run to run."""
    return {name: value for name, value in metrics.items() if not name.startswith("seconds/")}


@dataclass(frozen=True)
class Left:
    """The results of a script after its session's end. The session is called S here."""

    outcomes: dict[int, str]
    steps: dict[int, str]
    saved: dict[str, str]

    def differences(self, expected: Left) -> list[str]:
        found = []
        for name in ("outcomes", "steps", "saved"):
            here, there = getattr(self, name), getattr(expected, name)
            for key in here.keys() | there.keys():
                if here.get(key) != there.get(key):
                    found.append(f"{name} {key}: {here.get(key)}, not {there.get(key)}")
        return sorted(found)


@dataclass
class Life:
    """The life of one gateway: its number of steps.

    A `planned` end is requested. Workers survive it if they are `outlived`."""

    steps: int
    planned: bool = False
    outlived: bool = False


@dataclass
class Scenario:
    """A script, and the lives of the gateways before the last one.

    All else follows from the seed. `trouble`: workers fail too. `beside`: scripts of further
    sessions with runs on the same trainer."""

    script: Script
    folder: Path
    seed: int = 0
    lives: Sequence[Life] = ()
    trouble: bool = False
    beside: Sequence[Script] = ()
    scales: Sequence[int] = ()
    settings: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.steps: list[int] = []
        """The steps of each gateway."""
        self.files: list[int] = []
        """The steps at which a file was half written."""
        self.log: list[dict[str, Any]] = []
        self._rng = random.Random(self.seed)
        self._clock = Clock()
        self._misfortune = Misfortune(
            self._rng,
            deaths=2 * self.trouble,
            engine_deaths=1 * self.trouble,
            broken_connections=2 * self.trouble,
            damaged_snapshots=1 * self.trouble,
        )
        scripts = [self.script, *self.beside]
        training = TrainingSpec(lora=LoraSpec()) if self.beside else TrainingSpec()
        self._clients = [Client(script, self._rng, training, self.scales) for script in scripts]
        self._loop = CrashingLoop(self._clock, self._rng)
        self._host = ModelHost(self._misfortune)
        self._connections: list[DBAPIConnection] = []
        self._changes = {
            "data_dir": self.folder,
            "api_key": "tml-key-of-a-test",
            "session_ttl": 1e9,
            "sequence_gap_timeout": 100.0,
            "min_free_bytes": 0,
            "models": {"tiny": self.folder / "tiny"},
            "sharing": {"lora_runs": "always"},
        } | self.settings

    def run(self) -> Left:
        """Return the script's final results. Raises any fault."""
        (left,) = self.run_all()
        return left

    def run_all(self) -> list[Left]:
        """Return each script's final results. Raises any fault."""
        make_model(self.folder / "tiny")
        random.seed(self.seed)
        with ExitStack() as patched:
            settings = patched.enter_context(changed(self._changes))
            self._settings = GatewaySettings.model_validate(settings)
            patched.enter_context(_logged_to(self.log))
            patched.enter_context(self._clock.everywhere())
            for name, replacement in {
                "gateway.core.locked_data_directory": lambda *_args, **_more: nullcontext(),
                "gateway.storage.database._MAX_BATCH": self._rng.choice((1, 2, 512)),
                "gateway.storage.drivers.create_engine": self._engine,
                "gateway.runs.journal.write_file": self._write_file,
                "os.fsync": lambda _fd: None,
                "secrets.token_hex": lambda size=16: self._rng.randbytes(size).hex(),
            }.items():
                patched.enter_context(patch(name, replacement))
            # It would report the closed connections of dead gateways.
            pool = logging.getLogger("sqlalchemy.pool.impl.QueuePool")
            patched.enter_context(patch.object(pool, "disabled", True))
            patched.callback(self._loop.bury)
            for life in self.lives:
                self._live(life)
            left = self._live(None)
        faults = [entry for entry in self.log if entry["event"] in _FAULTS or "fault" in entry]
        assert not faults, "\n".join(f"{entry}" for entry in faults)
        assert left is not None
        shutil.rmtree(self.folder)
        return left

    def _engine(self, *args: Any, **more: Any) -> Engine:
        engine = create_engine(*args, **more)
        engine.dialect = _SQL.setdefault("dialect", engine.dialect)
        engine._compiled_cache = _SQL
        event.listen(engine, "connect", lambda each, _record: self._connections.append(each))
        event.listen(engine, "commit", lambda _connection: self._loop.step())
        return engine

    def _write_file(self, file: Path, content: bytes, *, synced: bool = False) -> None:
        """The gateway may die in the middle."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_name(f".{file.name}").write_bytes(content[: len(content) // 2])
        self._loop.step()
        self.files.append(self._loop.steps)
        write_file(file, content, synced=synced)

    def _live(self, life: Life | None) -> list[Left] | None:
        stopping = asyncio.Event()

        def at_step(number: int) -> None:
            if life is not None and number == life.steps:
                if not life.planned:
                    raise Crash
                stopping.set()

        launcher = ModelLauncher(self._host)
        stop = Stop(hand_over=life is not None and life.outlived)
        try:
            with patch.object(grpc.aio, "insecure_channel", launcher.channel):
                gateway = f"gateway {len(self.steps)}"
                return self._loop.live(
                    gateway, self._main(launcher, stop, stopping), at_step=at_step
                )
        except Crash:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
            if life is not None and not life.outlived:
                self._host.kill_all()
            return None
        finally:
            self.steps.append(self._loop.steps)
            self._loop.live("outage", asyncio.sleep(self._rng.random() * 10))

    async def _main(
        self, launcher: ModelLauncher, stop: Stop, stopping: asyncio.Event
    ) -> list[Left] | None:
        epoch = Epoch(number=len(self.steps), superseded=lambda: None)
        async with Gateway.open(
            self._settings,
            launchers=for_each_kind(launcher),
            metrics=Metrics(),
            epoch=epoch,
            stop=stop,
        ) as gateway:
            clients = asyncio.gather(*(self._serve(gateway, each) for each in self._clients))
            stopped = asyncio.create_task(stopping.wait())
            await asyncio.wait({clients, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if not clients.done():
                clients.cancel()
                await asyncio.gather(clients, return_exceptions=True)
                return None
            clients.result()
            return await self._left(gateway)

    async def _serve(self, gateway: Gateway, client: Client) -> None:
        async with asyncio.timeout(DEADLINE):
            await client.go_on(gateway)
            await client.ask_again(gateway)
            await gateway.end_session(
                session_id=client.session_id, state="finished", reason="finished", detail=""
            )
            client.ended = True

    async def _left(self, gateway: Gateway) -> list[Left]:
        """Only saved checkpoints and ended operations may remain."""
        database, data_dir = gateway.database, self.folder
        await gateway.database.flush()
        await gateway.collector.empty_trash()
        unfinished = operations.c.ended_at.is_(None)
        kept = operations.c.payload.is_not(None) | operations.c.call.is_not(None)
        for what, query in {
            "operations that have not ended": select(operations).where(unfinished),
            "payloads or calls": select(operations).where(kept),
            "snapshots": select(snapshots),
            "active runs": select(runs).where(runs.c.state != "ended"),
            "workers": select(workers),
        }.items():
            rows = await database.read(query)
            assert not rows, f"{what} are left: {[dict(row) for row in rows]}"
        assert not self._host.workers, f"{self._host.workers} still run"
        limits = gateway.limits
        for ledger in (limits.operations, limits.operation_bytes, limits.held):
            assert ledger.total == 0, f"{ledger.total} of a limit are left"
        assert not gateway.checkpoints.snapshot_bytes, "bytes of snapshots are counted"
        pinned = {folder for folder in gateway.pins.folders() if "/base/" not in folder}
        assert not pinned, f"{pinned} are pinned"
        assert not gateway.journal._unwritten
        assert not gateway.journal._replay_logs
        assert not gateway.runs.all()
        saved, folders = {}, set()
        for row in await database.read(select(checkpoints)):
            folder = data_dir / (row["folder"] or f"weights/{row['version'].replace(':', '_')}")
            folders.add(folder)
            (content,) = (f for f in ("state", "model.safetensors") if (folder / f).is_file())
            saved[row["path"]] = (
                f"step {row['step']} in {folder.name}: {(folder / content).read_text()}"
            )
        found = {f for root in _ROOTS for f in (data_dir / root).glob("*/*")}
        assert found == folders, f"{found ^ folders} are left, or lost"
        return [await self._left_of(each, database, saved) for each in self._clients]

    async def _left_of(self, client: Client, database: Database, saved: dict[str, str]) -> Left:
        of_run = training_steps.c.run_id == client.run_id
        steps = {
            row["seq_id"]: f"step {row['step']}, {untimed(row['metrics'])}, after "
            + row["weight_version"]
            for row in await database.read(select(training_steps).where(of_run))
        }
        mine = client.session_id
        return Left(
            outcomes=client.outcomes,
            steps={seq_id: text.replace(mine, "S") for seq_id, text in steps.items()},
            saved={path.replace(mine, "S"): text for path, text in saved.items() if mine in path},
        )


@contextmanager
def _logged_to(log: list[dict[str, Any]]) -> Iterator[None]:
    """Collect log entries in the block, with each exception's traceback as `fault`."""

    def collect(_logger: object, level: str, entry: dict[str, Any]) -> NoReturn:
        if entry.pop("exc_info", None):
            entry["fault"] = traceback.format_exc()
        log.append({"level": level, "at": time.monotonic()} | entry)
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[structlog.contextvars.merge_contextvars, collect])
    try:
        yield
    finally:
        structlog.configure(**before)


_SQL: dict[Any, Any] = {}
"""Shared by all gateways: compiling takes a third of the time."""
_FAULTS = {"write_failed", "file_work_failed", "writes_lost"}
_ROOTS = ("operations", "snapshots", "checkpoints", "weights")
