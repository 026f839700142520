"""Scenarios of a training run whose gateway is killed again and again, and what must come of it.

The gateway is the real one on a real SQLite database, in virtual time, with workers as a model
(`model_workers`). A gateway that is killed leaves its database and its files to the next one. Its
client is a model of the SDK: it repeats what was not answered, and asks for every result.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import grpc.aio
import structlog
from sqlalchemy import Engine, create_engine, event, select
from sqlalchemy.engine.interfaces import DBAPIConnection

from gateway.auth.identity import Caller, Readers
from gateway.core import Gateway
from gateway.futures.table import Outcome, Result, write_file
from gateway.identifiers import request_id_of, run_id_of
from gateway.metrics import Metrics
from gateway.runs.operations import (
    AdamParams,
    Body,
    Kind,
    LoadWeights,
    OptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
)
from gateway.sessions.registry import NewSession
from gateway.stopping import Stop
from gateway.storage.database import Database
from gateway.storage.tables import (
    checkpoints,
    operations,
    places,
    runs,
    scaled_samplers,
    snapshots,
    training_steps,
    workers,
)
from gateway.workers.epoch import Epoch
from tandem.errors import OptimizerSetting, Overloaded, TandemError
from tandem.settings import GatewaySettings
from tandem.worker import LoraSpec, TrainingSpec
from tests.support.crashing_loop import Clock, Crash, CrashingLoop, ThreadOfLoop
from tests.support.gateway.model_workers import (
    EMPTY,
    ENDLESS,
    FORWARD,
    LONG,
    POISON,
    UNREADABLE,
    Misfortune,
    ModelHost,
    ModelLauncher,
)

DEADLINE = 3 * 3600.0
"""Of a client in the life of one gateway, in virtual seconds."""
_OWNER = "local"


# --- What a client does ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """An operation that a client is to submit; its number is its place in the script.

    One that is `alone` is submitted when those before have ended, and those behind when it has;
    of one that is `late`, those behind do not wait for it. One that is `missing` never comes.
    """

    kind: Kind
    payload: bytes | None = None
    fields: Body | None = None
    load: str = ""
    refused: TandemError | None = None
    alone: bool = False
    late: bool = False
    missing: bool = False

    def body(self, run_id: str) -> Body | None:
        if not self.load:
            return self.fields
        path, _, state = self.load.partition(" ")
        body = LoadWeights(path=f"tinker://{run_id}/weights/{path}", optimizer=not state)
        return body.on_behalf_of(Readers((Caller(_OWNER, "k-0", "member"),)))


def batch(number: int = 0, *, size: int = 20) -> Planned:
    return Planned("forward_backward", payload=b"batch %d" % number + bytes(size))


def large_batch(number: int = 0) -> Planned:
    return batch(number, size=70_000)


def long_batch(number: int = 0) -> Planned:
    return Planned("forward_backward", payload=LONG + b"%d" % number)


def endless_batch() -> Planned:
    return Planned("forward_backward", payload=ENDLESS)


def forward(number: int = 0) -> Planned:
    return Planned("forward", payload=FORWARD + b"%d" % number)


def unreadable(kind: Kind = "forward_backward") -> Planned:
    return Planned(kind, payload=UNREADABLE)


def poison() -> Planned:
    return Planned("forward_backward", payload=POISON)


def empty_batch() -> Planned:
    return Planned("forward_backward", payload=b"batch" + EMPTY)


def empty_forward() -> Planned:
    return Planned("forward", payload=FORWARD + EMPTY)


def step(rate: float = 0.1) -> Planned:
    return Planned("optim_step", fields=OptimStep(params=AdamParams(learning_rate=rate)))


def refused(kind: Kind = "optim_step") -> Planned:
    payload = b"refused" if kind == "forward_backward" else None
    return Planned(kind, payload=payload, refused=OptimizerSetting("this is not to be"))


def save(name: str, *, overwrite: bool = False) -> Planned:
    return Planned("save_weights", fields=SaveWeights(path=name, overwrite=overwrite))


def save_for_sampler(name: str) -> Planned:
    return Planned("save_weights_for_sampler", fields=SaveWeightsForSampler(path=name))


def publish(number: int) -> Planned:
    fields = SaveWeightsForSampler(sampling_session_seq_id=number)
    return Planned("save_weights_for_sampler", fields=fields)


def export(name: str) -> Planned:
    return Planned("save_weights_external", fields=SaveWeightsExternal(path=name))


def load(name: str, *, optimizer: bool = True) -> Planned:
    return Planned("load_weights", load=name if optimizer else f"{name} weights")


def alone(planned: Planned) -> Planned:
    return replace(planned, alone=True)


def late(planned: Planned) -> Planned:
    return replace(planned, late=True)


def missing() -> Planned:
    return Planned("optim_step", missing=True)


Script = Sequence[Planned]


def random_script(rng: random.Random) -> Script:
    """Return a script of some steps, with whatever a client may do between them."""
    script: list[Planned] = []
    for number in range(rng.randrange(2, 6)):
        for _ in range(rng.randrange(4)):
            name, own = rng.choice("ab"), len(script)
            others = [
                *(large_batch(own), forward(own), publish(own), step(), unreadable()),
                *(
                    empty_batch(),
                    empty_forward(),
                    unreadable("forward"),
                    refused(),
                    refused("forward_backward"),
                ),
                *(save(name), save(name, overwrite=True), save_for_sampler(name), export(name)),
                *(load(name), load(name, optimizer=False)),
            ]
            script.append(rng.choice(others))
        script += [batch(number), step(rng.random())]
    return [*script, forward()]


class Client:
    """What the client of a run remembers, which no crash of a gateway takes from it. While the
    script goes on, its sampler is scaled to each of the numbers `scales`."""

    def __init__(
        self,
        script: Script,
        rng: random.Random,
        training: TrainingSpec,
        scales: Sequence[int] = (),
    ) -> None:
        self.script = script
        self.training = training
        self.scales = [*scales]
        self.session_id = ""
        self.ended = False
        self.outcomes: dict[int, str] = {}
        self._rng = rng
        self._accepted: set[int] = set()
        self._groups = _groups(script, window=rng.choice((1, 2, 4, 8)))

    @property
    def run_id(self) -> str:
        return run_id_of(session_id=self.session_id, model_seq_id=0)

    async def go_on(self, gateway: Gateway) -> None:
        """Submit what is left of the script, and return when everything has ended."""
        if not self.session_id:
            session = await gateway.sessions.create(NewSession(owner=_OWNER, sdk_version="0.38.0"))
            self.session_id = session.id
        if self.ended or gateway.sessions.touch(self.session_id) is None:
            missing = sum(planned.missing for planned in self.script)
            assert len(self.outcomes) == len(self.script) + 1 - missing, "it has ended too early"
            return
        known = [seq_id for seq_id in self.outcomes if self._rng.random() < 0.3]
        await asyncio.gather(*(self._ask(gateway, seq_id) for seq_id in known))
        if 0 not in self.outcomes:
            await self._create(gateway)
            await self._ask(gateway, 0)
        if self.scales:
            await self._scale(gateway)
        for together in self._groups:
            left = [seq_id for seq_id in together if seq_id not in self.outcomes]
            self._rng.shuffle(left)
            await asyncio.gather(*(self._carry_out(gateway, seq_id) for seq_id in left))

    async def _scale(self, gateway: Gateway) -> None:
        """Scale the sampler to one number after the other, the last one again and again. Return
        when so many engines serve, and no other has a place."""
        run = gateway.runs.get(self.run_id)
        assert run is not None
        sampler = gateway.samplers.ensure(
            session_id=self.session_id, model=run.model, rank=0, all_weights=True, kept=run.sampler
        )
        while True:
            await asyncio.sleep(self._rng.random() * 5)
            await gateway.samplers.scale(sampler, self.scales[0], wait=0)
            if len(self.scales) == 1:
                break
            self.scales.pop(0)
        sampler.start()
        for _ in range(1000):  # seconds, each of which would be a thousand steps of `until`
            serve = all(engine.serves for engine in sampler.engines)
            if serve and not sampler.replicas.leaving:
                break
            await asyncio.sleep(1)
        else:
            raise AssertionError(f"they do not all serve: {sampler.explain()}")
        assert len(sampler.engines) == self.scales[0]
        await gateway.database.flush()
        key = str(sampler.key)
        rows = await gateway.database.read(select(places).where(places.c.key.startswith(key)))
        assert len(rows) == self.scales[0]

    async def ask_again(self, gateway: Gateway) -> None:
        """Ask for all results once more."""
        await asyncio.gather(*(self._ask(gateway, seq_id) for seq_id in tuple(self.outcomes)))

    async def _create(self, gateway: Gateway) -> None:
        model = gateway.models.get("tiny")
        await gateway.runs.create(
            session_id=self.session_id,
            model_seq_id=0,
            model=model,
            training=self.training,
            load=None,
            user_metadata=None,
            request=b"create",
        )

    async def _carry_out(self, gateway: Gateway, seq_id: int) -> None:
        await asyncio.sleep(self._rng.random())
        if seq_id not in self._accepted or self._rng.random() < 0.1:
            await self._submit(gateway, seq_id)
            self._accepted.add(seq_id)
        await self._ask(gateway, seq_id)

    async def _submit(self, gateway: Gateway, seq_id: int) -> None:
        planned = self.script[seq_id - 1]
        while True:
            try:
                await gateway.runs.submit(
                    run_id=self.run_id,
                    seq_id=seq_id,
                    kind=planned.kind,
                    body=planned.body(self.run_id),
                    request=repr(planned).encode() if planned.payload is None else b"",
                    payload=planned.payload,
                    refused=planned.refused,
                )
                return
            except Overloaded as error:
                await asyncio.sleep(error.retry_after or 1.0)

    async def _ask(self, gateway: Gateway, seq_id: int) -> None:
        """Ask for a result until it is there. It is what it was if it was there before."""
        request_id = request_id_of(owner=self.run_id, seq_id=seq_id)
        outcome: Outcome | None = None
        while outcome is None:
            future = gateway.futures.get(request_id)
            if future is None:
                outcome = await gateway.recall(request_id)
                assert outcome is not None, f"nobody knows {request_id}"
            else:
                outcome = await gateway.futures.wait(future, timeout=gateway.settings.long_poll)
                if outcome is None and gateway.futures.closing:
                    await asyncio.sleep(1e9)  # the next gateway is asked
        if isinstance(outcome, Result):
            body = outcome.file.read_bytes() if outcome.file is not None else outcome.body
            text = body.decode()
        else:
            text = f"{outcome.type}: {outcome.message}"
        text = text.replace(self.session_id, "S")
        before = self.outcomes.setdefault(seq_id, text)
        assert text == before, f"operation {seq_id} ended twice"


def _groups(script: Script, *, window: int) -> list[list[int]]:
    """Return the numbers of the operations that are submitted together, in any order."""
    groups: list[list[int]] = [[]]
    late = []
    for seq_id, planned in enumerate(script, 1):
        if planned.late:
            late.append(seq_id)
        elif planned.alone:
            groups += [[seq_id], late, []]
            late = []
        elif not planned.missing:
            groups[-1].append(seq_id)
            if len(groups[-1]) == window:
                groups.append([])
    return groups


# --- What becomes of it ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Left:
    """What a script leaves when its session has ended, which is called S here."""

    outcomes: dict[int, str]
    steps: dict[int, str]
    saved: dict[str, str]

    def differences(self, expected: Left) -> list[str]:
        """Say in which the two differ."""
        found = []
        for name in ("outcomes", "steps", "saved"):
            here, there = getattr(self, name), getattr(expected, name)
            for key in here.keys() | there.keys():
                if here.get(key) != there.get(key):
                    found.append(f"{name} {key}: {here.get(key)}, not {there.get(key)}")
        return sorted(found)


@dataclass
class Life:
    """Of one gateway: it ends at this step; `planned`, as it does when it is asked to. Its workers
    end with it, if they do not outlive it."""

    steps: int
    planned: bool = False
    outlived: bool = False


@dataclass
class Scenario:
    """A script, and the lives of the gateways before the last one. All the rest follows from the
    seed. `trouble`: workers have troubles of their own. `beside`: the scripts of further sessions,
    whose runs share the trainer."""

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
        """That each gateway has lived."""
        self.files: list[int] = []
        """Before these, a file was half written."""
        self.log: list[dict[str, Any]] = []
        """What the gateways have logged."""
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
        self._settings = GatewaySettings.model_validate(
            {
                "data_dir": self.folder,
                "api_key": "tml-key-of-a-test",
                "session_ttl": 1e9,
                "sequence_gap_timeout": 100.0,
                "min_free_bytes": 0,
                "delta_versions": "auto",
                "models": {"tiny": self.folder / "tiny"},
                "sharing": {"lora_runs": "always"},
            }
            | self.settings
        )

    def run(self) -> Left:
        """Return what the script leaves in the end. Raises whatever goes wrong."""
        (left,) = self.run_all()
        return left

    def run_all(self) -> list[Left]:
        """Return what each script leaves in the end. Raises whatever goes wrong."""
        (self.folder / "tiny").mkdir(parents=True)
        (self.folder / "tiny" / "config.json").write_text('{"architectures": ["Model"]}')
        random.seed(self.seed)
        with ExitStack() as patched:
            patched.enter_context(_logged_to(self.log))
            patched.enter_context(self._clock.everywhere())
            for name, replacement in {
                "gateway.core.locked_data_directory": lambda *_args, **_more: nullcontext(),
                "gateway.storage.database._MAX_BATCH": self._rng.choice((1, 2, 512)),
                "gateway.storage.drivers.create_engine": self._engine,
                "gateway.storage.database.WorkThread": ThreadOfLoop,
                "gateway.storage.log_sync.WorkThread": ThreadOfLoop,
                "gateway.runs.journal.write_file": self._write_file,
                "os.fsync": lambda _fd: None,
                "secrets.token_hex": lambda size=16: self._rng.randbytes(size).hex(),
            }.items():
                patched.enter_context(patch(name, replacement))
            # It would tell that the connections of the dead are closed.
            pool = logging.getLogger("sqlalchemy.pool.impl.QueuePool")
            patched.enter_context(patch.object(pool, "disabled", True))
            patched.callback(self._loop.bury)
            for life in self.lives:
                self._live(life)
            left = self._live(None)
        faults = [entry for entry in self.log if entry["event"] in _FAULTS or "fault" in entry]
        assert not faults, "\n".join(entry.get("fault", str(entry)) for entry in faults)
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
        """As the gateway does; it may die in the middle."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_name(f".{file.name}").write_bytes(content[: len(content) // 2])
        self._loop.step()
        self.files.append(self._loop.steps)
        write_file(file, content, synced=synced)

    def _live(self, life: Life | None) -> list[Left] | None:
        """Let one gateway live."""
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
            self._settings, launcher=launcher, metrics=Metrics(), epoch=epoch, stop=stop
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
        """Look at what is left, of which nothing may be but what was saved and what ended."""
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
            "active workers": select(workers).where(workers.c.state != "ended"),
            "places": select(places),
            "scaled samplers": select(scaled_samplers),
        }.items():
            rows = await database.read(query)
            assert not rows, f"{what} are left: {[tuple(row.values())[:5] for row in rows]}"
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
            row["seq_id"]: f"step {row['step']}, {row['metrics']}, after {row['weight_version']}"
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
    """Collect what is logged in the block, with the traceback of each exception as `fault`."""

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
"""The statements that SQLAlchemy has compiled, for all gateways: it takes a third of the time."""
_FAULTS = {"write_failed", "file_work_failed", "writes_lost"}
_ROOTS = ("operations", "snapshots", "checkpoints", "weights")
