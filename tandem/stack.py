"""A gateway and its agent as child processes: start them, again when they end, and stop them.

`tandem up`, `tandem demo`, the tests and the benchmarks start the stack through this module.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tandem.errors import InvalidRequest, ServerError, WorkerStartFailed
from tandem.heartbeat import HEARTBEAT_FD, Heartbeats
from tandem.process_birth import born
from tandem.settings import GatewaySettings
from tandem.worker import SUPERVISOR_PID, without_secrets

ENDPOINT_NAME = "gateway.json"
SENTENCE = "tandem gateway: "
"""Begins the line of standard error with which a gateway says why it does not start."""

_TAIL_BYTES = 16 * 1024
_NO_CERTIFICATES = False
"""Of a gateway that speaks plain HTTP: reading the system's certificates takes 25 ms."""
_POLL_SECONDS = 0.05
_STOP_SECONDS = 60.0
"""For the end of agent or gateway, beside TANDEM_STOP_TIMEOUT; what lasts longer is killed."""
_FIRST_WAIT = 0.25
_MOST_ENDS = 5
_MOST_ENDS_WITHIN = 60.0


class Endpoint(BaseModel):
    """Where a gateway listens: the content of `DATA/gateway.json` (mode 0600). `born` tells its
    process from another one with its `pid`."""

    model_config = ConfigDict(frozen=True)

    url: str
    pid: int
    born: str = ""
    api_key: str = Field(repr=False)

    def client(self, *, timeout: float = 60.0) -> httpx.Client:
        """Return a client of the gateway's own API that sends the key."""
        return httpx.Client(
            base_url=f"{self.url}/api/tandem/v1/",
            headers={"X-API-Key": self.api_key},
            timeout=timeout,
            verify=self.url.startswith("https:") or _NO_CERTIFICATES,
        )


def read_endpoint(data_dir: Path) -> Endpoint | None:
    """Return the endpoint that a gateway has announced in this data directory, if that one runs,
    and here: in another host or container, it has a loopback of its own."""
    private = Path(os.environ.get("TANDEM_PRIVATE_DIR") or data_dir)
    try:
        endpoint = Endpoint.model_validate_json((private / ENDPOINT_NAME).read_bytes())
    except (OSError, ValidationError):
        return None
    return endpoint if endpoint.born and endpoint.born == born(endpoint.pid) else None


class Stack:
    """A gateway, and the agent that starts its workers, which live as long as this context manager.

    `settings` are `TANDEM_*` variables without the prefix, in lower case:
    `Stack(data_dir=Path(".tandem"), settings={"port": "0", "trainer_ranks": "2"})`. Each of the two
    is started again when it ends, the gateway on the port that it had; `tell` is given a sentence
    then. One that ends again and again ends the stack. Both end with this process, however that
    ends. `say` is given what is waited for while they are stopped.
    """

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
        self._agent = _Supervised(
            name="agent",
            command=[sys.executable, "-m", "tandem.agent", "--data-dir", str(data_dir)],
            environment=without_secrets(environment),
            log_path=data_dir / "logs" / "agent.log",
            patience=patience,
        )
        self._gateway = _Supervised(
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
        # The kernel ends agent and gateway with the thread that started them, and this is the one
        # that does so whenever they are to be started.
        self._thread = threading.Thread(target=self._run, name="stack", daemon=True)

    @property
    def endpoint(self) -> Endpoint:
        assert self._endpoint is not None, "the stack is not started"
        return self._endpoint

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The gateway's process: another one after each time that it was started again."""
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
        """Return a client of the gateway's own API that sends the key."""
        return self.endpoint.client(timeout=timeout)

    def add_model(self, *, name: str, path: Path) -> None:
        """Register a base model with the gateway."""
        with self.client() as client:
            answer = client.post("models", json={"name": name, "path": str(path.resolve())})
            if answer.is_error:
                raise ValueError(answer.json().get("error", answer.text))

    def __enter__(self) -> Stack:
        try:
            self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.log_path.parent.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise unusable(self.data_dir, error) from error
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
        """Block until the stack has ended by itself, and raise the `ServerError` that says why."""
        self._over.wait()
        if self._fault is not None:
            raise self._fault

    def stop(self) -> None:
        """Stop the gateway, which saves its runs and stops its workers, and then the agent; when
        interrupted, kill them. Idempotent."""
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
            # A gateway that does not answer yet has no clients. SIGTERM would leave its workers.
            if self._answers():
                most = _seconds("stop_timeout", self._gateway.environment) + _STOP_SECONDS
                self._gateway.stop(signal.SIGINT, most, at_once=self._at_once, say=self._say)
        finally:
            self._gateway.kill()
            self._gateway.close()
            self._agent.stop(signal.SIGTERM, _STOP_SECONDS, at_once=self._at_once, say=self._say)
            self._agent.close()

    def _supervise(self) -> None:
        """Start both, and whichever ends, until told to stop. Raises `TandemError` when that is of
        no use."""
        self._agent.start()
        self._gateway.start()
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

    def _note_end(self, ended: _Supervised) -> None:
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
            often = f"within {_MOST_ENDS_WITHIN:.0f} s" if served else "before it served"
            raise ServerError(
                f"the {ended.name} ended by itself {ends} times {often}; the last time, {why}"
            )
        self._tell(f"the {ended.name} ended by itself and is started again: {why}")

    def _answers(self) -> bool:
        """Return whether the gateway that runs has answered."""
        process = self._gateway.process
        return (
            process is not None and self._endpoint is not None and self._endpoint.pid == process.pid
        )

    def _note_answer(self, gateway: _Supervised) -> None:
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


class _Supervised:
    """The agent or the gateway: a child process that is started again when it ends."""

    def __init__(
        self,
        *,
        name: str,
        command: list[str],
        environment: dict[str, str],
        log_path: Path,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.environment = environment
        self.log_path = log_path
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        self.due = 0.0
        self._sentence = f"tandem {name}: "
        self._command = command
        self._clock = clock
        self._patience = patience
        self._heartbeats = Heartbeats()
        self._was_silent = False
        self._log_start = 0
        self._ends: deque[float] = deque()

    def start(self) -> None:
        try:
            log = open(self.log_path, "ab", opener=_private)  # noqa: SIM115 - closed below
        except OSError as error:
            raise unusable(self.log_path.parent, error) from error
        last, self._heartbeats, self._was_silent = self._heartbeats, Heartbeats(), False
        last.close()
        with log:
            self._log_start = log.tell()
            self.started_at = self._clock()
            self.process = subprocess.Popen(
                self._command,
                env={
                    **self.environment,
                    HEARTBEAT_FD: str(self._heartbeats.fd),
                    SUPERVISOR_PID: str(os.getpid()),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self._heartbeats.fd],
                start_new_session=True,  # so that Ctrl-C reaches it once, through stop()
                # No preexec_fn: it needs a real fork, in which gRPC's handlers can crash the child
                # of a process that has called anybody.
            )

    def kill_if_silent(self) -> None:
        """Kill it if its event loop has stood still for too long."""
        if self._heartbeats.silence() > self._patience:
            self._was_silent = True
            self.kill()

    def start_when_due(self) -> None:
        if self._clock() >= self.due:
            self.start()

    def note_end(self, *, served: bool = True) -> int:
        """Note that it has ended, and is to be started again after a while; return how often it
        ended lately. Ends before it `served` count together, however long its starts take."""
        now = self._clock()
        self._ends.append(now)
        while served and self._ends[0] < now - _MOST_ENDS_WITHIN:
            self._ends.popleft()
        self.due = now + _FIRST_WAIT * 2 ** (len(self._ends) - 1)
        self.process = None
        return len(self._ends)

    def why_ended(self) -> str:
        """Return, of a process that has ended, the sentence that it left; else how it ended."""
        assert self.process is not None
        if self._was_silent:
            return f"it answered nothing for {self._patience:g} s (log: {self.log_path})"
        with self._read_log() as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start if self._log_start <= size else 0, size - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        for line in reversed(lines):
            if line.startswith(self._sentence):
                return f"{line.removeprefix(self._sentence)} (log: {self.log_path})"
        status = self.process.wait()
        if status < 0:
            name = next((s.name for s in signal.Signals if s == -status), f"signal {-status}")
            memory = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
            return f"it was killed by {name}{memory} (log: {self.log_path})"
        return f"it exited with status {status}; see its log, {self.log_path}"

    def stop(
        self,
        number: signal.Signals,
        timeout: float,
        *,
        at_once: threading.Event,
        say: Callable[[str], None],
    ) -> None:
        """Ask it to end, and kill it after `timeout` seconds, or when it is to end `at_once`. What
        it tells meanwhile is passed on to `say`."""
        if self.process is None or self.process.poll() is not None:
            return
        try:
            with self._read_log() as log:
                log.seek(0, os.SEEK_END)
                self.process.send_signal(number)
                deadline = time.monotonic() + timeout
                while self.process.poll() is None and time.monotonic() < deadline:
                    if at_once.wait(_POLL_SECONDS):
                        break
                    for line in (each.decode(errors="replace") for each in log):
                        if line.startswith(self._sentence):
                            say(line.removeprefix(self._sentence).rstrip())
        finally:
            self.kill()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        """Hear of it no more."""
        self._heartbeats.close()

    def _read_log(self) -> IO[bytes]:
        try:
            return self.log_path.open("rb")
        except OSError:  # somebody has removed it: nothing can be said, all else goes on
            return io.BytesIO()


def _to_whoever_listens(tell: Callable[[str], None], sentence: str) -> None:
    with suppress(OSError, SystemExit):  # with which rich answers that the reader has gone
        tell(sentence)


def _seconds(setting: str, environment: Mapping[str, str]) -> float:
    """Return a setting of the gateway; its default if it is wrong: the gateway says so."""
    default: float = GatewaySettings.model_fields[setting].default
    try:
        value = float(environment.get(f"TANDEM_{setting.upper()}", default))
    except ValueError:
        return default
    return value if value > 0 else default


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def unusable(data_dir: Path, error: OSError) -> InvalidRequest:
    """Return the error for a data directory in which something could not be made or opened."""
    in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
    reason = "there is a file in the place of a directory" if in_the_way else error.strerror
    return InvalidRequest(
        f"the data directory {data_dir} cannot be used: {error.filename or data_dir}: "
        f"{reason or error}; choose another with --data-dir (TANDEM_DATA_DIR)"
    )


def answers(endpoint: Endpoint) -> bool:
    """Return whether the gateway's health route answers with success."""
    try:
        url = f"{endpoint.url}/api/v1/healthz"
        return httpx.get(url, timeout=5, verify=_NO_CERTIFICATES).is_success
    except httpx.HTTPError:
        return False
