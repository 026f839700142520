"""A gateway with workers that do arithmetic instead of learning.

The gateway is real, on a real port, in a thread. The workers are gRPC servers in this process. A
fake launcher "starts" them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future as ThreadFuture
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import tinker

from gateway.api.tinker.sampling import sampler_of
from gateway.app import GatewayServer, create_app, make_server
from gateway.sampling.engine import SamplerEngine
from gateway.workers.placing import candidates
from tandem.settings.gateway import GatewaySettings
from tandem.wire.v1 import tinker_pb2
from tests.support.gateway.constants import changed
from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.gateway.fake_trainer import FakeTrainer
from tests.support.gateway.requests import create_run, retrieve_future
from tests.support.model_files import tensor_file
from tests.support.postgres import url_for
from tests.support.waiting import PATIENCE, until, wait_until

KEY = "tml-test-key"


class Gate:
    """A running gateway, seen from a test's thread."""

    def __init__(self, *, server: GatewayServer, launcher: FakeLauncher, loop, settings) -> None:
        self.server = server
        self.launcher = launcher
        self.settings = settings
        self._loop = loop

    @property
    def gateway(self):
        return self.server.gateway

    @property
    def url(self) -> str:
        return self.server.url

    def run(self, coroutine):
        """A coroutine or plain function."""
        if callable(coroutine):

            async def call(function=coroutine):
                return function()

            coroutine = call()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE)

    def http(self, key: str = KEY) -> httpx.Client:
        # Reading the system's certificates takes longer than a request.
        return httpx.Client(base_url=self.url, headers={"X-API-Key": key}, timeout=30, verify=False)

    def service(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=KEY)

    def waiting_for_places(self) -> list[str]:
        """The keys of the workers that wait for a group, the next one first."""
        return self.run(lambda: [row.key for row in candidates(self.gateway.supervisor.overview())])

    def placed(self) -> dict[str, str]:
        """The groups of the workers that have one, by key."""
        rows = self.gateway.supervisor.roster.rows
        return self.run(lambda: {key: row.group for key, row in rows.items() if row.group})

    def start_engines(self, session_id: str = "", *, newest: int = 0) -> list[SamplerEngine]:
        """Start the engines of sampling sessions, as their first samples would."""
        mine = [s for s in self.gateway.sampling.all() if s.id.startswith(session_id)]
        engines = []
        for session in mine[-newest:]:
            sampler = self.run(lambda session=session: sampler_of(self.gateway, session))
            self.run(sampler.start)
            engine = sampler.engine
            wait_until(lambda engine=engine: engine.state in ("ready", "failed", "stopped"))
            engines.append(engine)
        return engines

    def worker(self, kind: str, index: int = -1):
        """Return the newest worker of a kind or id prefix.

        `sampler-SESSION` is the engine of the session's newest sampling session, which other
        sessions may share. It is started if needed."""
        if kind.startswith("sampler"):
            session_id = kind.partition("-")[2]
            for engine in self.start_engines(session_id, newest=1):
                kind = f"sampler-{engine.session_id}" if session_id else kind
        ids = wait_until(lambda: [w for w in self.launcher.servicers if w.startswith(kind)])
        return ids[index], self.launcher.servicers[ids[index]]

    def trainer_of(self, run_id: str) -> FakeTrainer:
        """Return the newest trainer that has a run."""
        return wait_until(lambda: [each for each in self.launcher.trainers if run_id in each.runs])[
            -1
        ]

    def session_id(self, key: str = KEY, **about: object) -> str:
        """Create a session of a key's owner, and return its id."""
        body = {"tags": [], "sdk_version": "test"} | about
        with self.http(key) as client:
            return client.post("/api/v1/create_session", json=body).json()["session_id"]

    def age_sessions(self, seconds: float) -> None:
        """Make each session's last sign of life older."""
        for session in self.run(self.gateway.sessions.all):
            session.seen_at -= seconds

    def run_id(
        self,
        session_id: str,
        number: int = 0,
        model: str = "tiny:full",
        *,
        rank: int = 0,
        **asks: str,
    ) -> str:
        """Create a run as `create_run` does, and return its id once it is there."""
        with self.http() as client:
            answer = create_run(client, session_id, number, model, rank=rank, **asks)
            assert answer.status_code == 200, answer.text
            self.retrieve(answer.json()["request_id"])
            return answer.json()["model_id"]

    def retrieve(self, request_id: str) -> httpx.Response:
        with self.http() as client:
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline:
                answer = retrieve_future(client, request_id)
                if answer.status_code != 408:
                    return answer
        raise AssertionError(f"{request_id} did not end")


_CONSTANTS = {"long_poll": 0.3, "reaper_interval": 0.05}


def settings_for(tmp_path: Path, **changes) -> GatewaySettings:
    values = {
        "data_dir": tmp_path / "data",
        "database_url": url_for(tmp_path / "data"),
        "port": 0,
        "api_key": KEY,
        "session_ttl": 600,  # most clients of these tests send no heartbeats
        "min_free_bytes": 0,
        "stop_timeout": 0,  # a test may leave unfinished operations
        # Longer than any test holds an operation back.
        "operation_timeout": 2 * PATIENCE,
    }
    return GatewaySettings(**(values | changes))


def make_model(folder: Path, *, window: int = 64) -> Path:
    """Write a model's folder without weights. `window` is its longest sequence."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        f'{{"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": {window}}}'
    )
    (folder / "model.safetensors").write_bytes(tensor_file("weight"))
    return folder


@contextmanager
def running_gateway(
    tmp_path: Path,
    *,
    launcher: FakeLauncher | None = None,
    standby: bool = False,
    end: Callable[[], object] = lambda: None,
    **changes,
) -> Iterator[Gate]:
    """Run a gateway on a free port with the model `tiny`.

    A `standby` replaces one that has it. `end` is called when another gateway has replaced this
    one. `changes` are settings and constants (`constants.py`)."""
    with changed(_CONSTANTS | changes) as chosen:
        settings = settings_for(tmp_path, **chosen)
        with _serving(settings, launcher or FakeLauncher(), end) as gate:
            if not standby:
                model = make_model(tmp_path / "tiny")
                gate.run(gate.gateway.models.add(name="tiny", path=str(model)))
            yield gate


@contextmanager
def _serving(
    settings: GatewaySettings,
    launcher: FakeLauncher,
    end: Callable[[], object],
) -> Iterator[Gate]:
    ready: ThreadFuture[Gate] = ThreadFuture()

    async def serve() -> None:
        server = make_server(create_app(settings, launcher=launcher, end=end), settings)
        server.config.load()
        server.capture_signals = no_signals  # this is not the main thread
        task = asyncio.create_task(server.serve())
        await until(lambda: server.started or task.done())
        if task.done():
            ready.set_exception(AssertionError("the gateway did not start"))
            return
        ready.set_result(
            Gate(
                server=server, launcher=launcher, loop=asyncio.get_running_loop(), settings=settings
            )
        )
        await task

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    gate = ready.result(PATIENCE)
    try:
        yield gate
    finally:
        gate.server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the gateway did not stop"


@contextmanager
def no_signals() -> Iterator[None]:
    yield


def forward_backward_bytes(
    run_id: str, seq_id: int, *, forward_only: bool = False, tokens: int = 3
) -> bytes:
    message = tinker_pb2.ForwardBackwardRequest(
        model_id=run_id, seq_id=seq_id, loss_fn="cross_entropy", forward_only=forward_only
    )
    message.data.add().model_input.add().encoded_text.tokens = np.arange(
        tokens, dtype=np.int32
    ).tobytes()
    return message.SerializeToString()
