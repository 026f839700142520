"""A gateway and its agent as supervised child processes, for `tandem up`, `tandem demo`, tests and
benchmarks.

`supervised_process` is one of the two, and `host_summary` tells people what their trainers find."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tandem.agent.environment import inherited
from tandem.agent.process_identity import process_start
from tandem.errors import InvalidRequest, ServerError, WorkerStartFailed, unusable_directory
from tandem.protocol.own_machine import http_client
from tandem.settings.gateway import GatewaySettings
from tandem.stack.supervised_process import MOST_ENDS_WITHIN, SupervisedProcess

ENDPOINT_NAME = "gateway.json"
SENTENCE = "tandem gateway: "
"""Begins the line of standard error with which a gateway explains a failed start."""

_POLL_SECONDS = 0.05
_STOP_SECONDS = 60.0
"""Seconds until an ending process is killed, in addition to TANDEM_STOP_TIMEOUT."""
_MOST_ENDS = 5


class Endpoint(BaseModel):
    """A gateway's address and key: the content of `DATA/gateway.json` (mode 0600).

    `process_start` identifies the process, because its `pid` can be used again."""

    model_config = ConfigDict(frozen=True)

    url: str
    pid: int
    process_start: str = ""
    api_key: str = Field(repr=False)

    def client(self, *, timeout: float = 60.0) -> httpx.Client:
        """Return a client of Tandem's API that sends the key."""
        return http_client(
            f"{self.url}/api/tandem/v1/", headers={"X-API-Key": self.api_key}, timeout=timeout
        )


def read_endpoint(data_dir: Path) -> Endpoint | None:
    """Return the endpoint of this data directory's running gateway, or None.

    A gateway in another host or container does not count: its loopback is unreachable."""
    private = Path(os.environ.get("TANDEM_PRIVATE_DIR") or data_dir)
    try:
        endpoint = Endpoint.model_validate_json((private / ENDPOINT_NAME).read_bytes())
    except (OSError, ValidationError):
        return None
    return (
        endpoint
        if endpoint.process_start and endpoint.process_start == process_start(endpoint.pid)
        else None
    )


class Stack:
    """A gateway and an agent that live as long as this context manager.

    `settings` are `TANDEM_*` variables without the prefix, in lower case:
    `Stack(data_dir=Path(".tandem"), settings={"port": "0", "trainer_ranks": "2"})`. A process that
    ends is started again, the gateway on its old port, and `tell` gets a sentence. Repeated ends
    stop the stack. Both processes end with this one in any case. `say` reports progress during the
    stop."""

    def __init__(
        self,
        *,
        data_dir: Path,
        settings: Mapping[str, str] | None = None,
        start_timeout: float = 60.0,
        tell: Callable[[str], None] = lambda sentence: None,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.data_dir = data_dir
        environment = dict(os.environ)
        environment |= {f"TANDEM_{key.upper()}": value for key, value in (settings or {}).items()}
        environment["TANDEM_DATA_DIR"] = str(data_dir)
        patience = _seconds("worker_unresponsive_timeout", environment)
        self._agent = SupervisedProcess(
            name="agent",
            command=[sys.executable, "-m", "tandem.agent", "--data-dir", str(data_dir)],
            environment=inherited(environment),
            log_path=data_dir / "logs" / "agent.log",
            patience=patience,
        )
        self._gateway = SupervisedProcess(
            name="gateway",
            command=[sys.executable, "-m", "gateway"],
            environment=environment,
            log_path=data_dir / "logs" / "gateway.log",
            patience=patience,
        )
        self._start_timeout = start_timeout
        self._tell = partial(_to_whoever_listens, tell)
        self._say = partial(_to_whoever_listens, say)
        self._endpoint: Endpoint | None = None
        self._up = threading.Event()
        self._stopping = threading.Event()
        self._at_once = threading.Event()
        self._over = threading.Event()
        self._fault: Exception | None = None
        # The kernel ends agent and gateway with the thread that started them. So one thread starts
        # them.
        self._thread = threading.Thread(target=self._run, name="stack", daemon=True)

    @property
    def endpoint(self) -> Endpoint:
        assert self._endpoint is not None, "the stack is not started"
        return self._endpoint

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The gateway's current process. It changes with each restart."""
        assert self._gateway.process is not None, "the stack is not started"
        return self._gateway.process

    @property
    def agent_process(self) -> subprocess.Popen[bytes]:
        assert self._agent.process is not None, "the stack is not started"
        return self._agent.process

    @property
    def log_path(self) -> Path:
        return self._gateway.log_path

    def client(self, *, timeout: float = 60.0) -> httpx.Client:
        """Return a client of Tandem's API that sends the key."""
        return self.endpoint.client(timeout=timeout)

    def add_model(self, *, name: str, path: Path) -> None:
        """Raises `ValueError`."""
        with self.client() as client:
            answer = client.post("models", json={"name": name, "path": str(path.resolve())})
            if answer.is_error:
                raise ValueError(answer.json().get("error", answer.text))

    def __enter__(self) -> Stack:
        there = read_endpoint(self.data_dir)
        if there is not None and answers(there):
            raise InvalidRequest(
                f"Tandem is up at {there.url} already, with the data directory {self.data_dir} "
                f"(process {there.pid}); use that one, stop it first (Ctrl-C where it runs), or "
                "choose another directory with --data-dir (TANDEM_DATA_DIR)"
            )
        try:
            self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.log_path.parent.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise unusable_directory(self.data_dir, error) from error
        self._thread.start()
        try:
            self._up.wait()
            if self._fault is not None:
                raise self._fault
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def wait(self) -> None:
        """Block until the stack ends by itself. Raises the `ServerError` that ended it."""
        self._over.wait()
        if self._fault is not None:
            raise self._fault

    def stop(self) -> None:
        """Stop the gateway, which saves its runs and stops its workers, then the agent.

        An interrupt kills them. Idempotent."""
        self._stopping.set()
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self._at_once.set()
            self._thread.join()
        self._endpoint = None

    def _run(self) -> None:
        try:
            try:
                self._supervise()
            finally:
                self._end()
        except Exception as error:  # noqa: BLE001 - raised again to whoever uses the stack
            self._fault = error
        finally:
            self._over.set()
            self._up.set()

    def _end(self) -> None:
        try:
            # A gateway that never answered has no clients. SIGTERM would leave its workers running.
            if self._answers():
                most = _seconds("stop_timeout", self._gateway.environment) + _STOP_SECONDS
                self._gateway.stop_process(
                    signal.SIGINT, most, at_once=self._at_once, say=self._say
                )
        finally:
            self._gateway.kill()
            self._gateway.close()
            self._agent.stop_process(
                signal.SIGTERM, _STOP_SECONDS, at_once=self._at_once, say=self._say
            )
            self._agent.close()

    def _supervise(self) -> None:
        """Start both processes, and restart an ended one, until `stop`. Raises `TandemError` if
        that is hopeless."""
        self._agent.start_process()
        self._gateway.start_process()
        while not self._stopping.wait(_POLL_SECONDS):
            for each in (self._agent, self._gateway):
                if each.process is None:
                    each.start_when_due()
                elif each.process.poll() is not None:
                    self._note_end(each)
                else:
                    each.kill_if_silent()
            if not self._answers() and self._gateway.process is not None:
                self._note_answer(self._gateway)

    def _note_end(self, ended: SupervisedProcess) -> None:
        assert ended.process is not None
        asked = ended.process.returncode == 0
        why = "it was asked to end" if asked else ended.why_ended()
        if not self._up.is_set():
            raise WorkerStartFailed(f"the {ended.name} did not start: {why}")
        if asked:
            self._tell(f"the {ended.name} was asked to end, and is started again")
            ended.process = None
            return
        served = ended is self._agent or self._answers()
        ends = ended.note_end(served=served)
        if ends >= _MOST_ENDS:
            often = f"within {MOST_ENDS_WITHIN:.0f} s" if served else "before it served"
            raise ServerError(
                f"the {ended.name} ended by itself {ends} times {often}; the last time, {why}"
            )
        self._tell(f"the {ended.name} ended by itself and is started again: {why}")

    def _answers(self) -> bool:
        process = self._gateway.process
        return (
            process is not None and self._endpoint is not None and self._endpoint.pid == process.pid
        )

    def _note_answer(self, gateway: SupervisedProcess) -> None:
        assert gateway.process is not None
        endpoint = read_endpoint(self.data_dir)
        if endpoint is not None and endpoint.pid == gateway.process.pid and answers(endpoint):
            self._endpoint = endpoint
            gateway.environment["TANDEM_PORT"] = str(httpx.URL(endpoint.url).port)
            self._up.set()
        elif time.monotonic() > gateway.started_at + self._start_timeout:
            if not self._up.is_set():
                raise WorkerStartFailed(
                    f"the gateway did not answer within {self._start_timeout:.0f} s; see "
                    f"{gateway.log_path}"
                )
            gateway.process.kill()


def _to_whoever_listens(tell: Callable[[str], None], sentence: str) -> None:
    with suppress(OSError, SystemExit):  # rich raises SystemExit if the reader has gone
        tell(sentence)


def _seconds(setting: str, environment: Mapping[str, str]) -> float:
    """An invalid setting gives the default. The gateway reports the error."""
    default: float = GatewaySettings.model_fields[setting].default
    try:
        value = float(environment.get(f"TANDEM_{setting.upper()}", default))
    except ValueError:
        return default
    return value if value > 0 else default


def answers(endpoint: Endpoint) -> bool:
    try:
        with http_client(endpoint.url, timeout=5) as client:
            return client.get("api/v1/healthz").is_success
    except httpx.HTTPError:
        return False
