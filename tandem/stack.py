"""A gateway as a child process: start it, wait until it answers, stop it.

`tandem up`, `tandem demo`, the tests and the benchmarks start the stack through this module.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tandem.errors import InvalidRequest, WorkerStartFailed
from tandem.worker import die_with_parent

ENDPOINT_NAME = "gateway.json"
SENTENCE = "tandem gateway: "
"""Begins the line of standard error with which a gateway says why it does not start."""

_TAIL_BYTES = 16 * 1024


class Endpoint(BaseModel):
    """Where a gateway listens: the content of `DATA/gateway.json` (mode 0600)."""

    model_config = ConfigDict(frozen=True)

    url: str
    pid: int
    api_key: str = Field(repr=False)


def read_endpoint(data_dir: Path) -> Endpoint | None:
    """Return the endpoint that a running gateway has announced in this data directory, if any."""
    try:
        endpoint = Endpoint.model_validate_json((data_dir / ENDPOINT_NAME).read_bytes())
        os.kill(endpoint.pid, 0)
    except (OSError, ValidationError):
        return None
    return endpoint


class Stack:
    """A gateway that lives as long as this context manager.

    `settings` are `TANDEM_*` variables without the prefix, in lower case:
    `Stack(data_dir=Path(".tandem"), settings={"port": "0", "trainer_ranks": "2"})`.
    The gateway ends with this process, however that ends.
    """

    def __init__(
        self,
        *,
        data_dir: Path,
        settings: Mapping[str, str] | None = None,
        start_timeout: float = 60.0,
        stop_timeout: float = 30.0,
    ) -> None:
        self.data_dir = data_dir
        self.log_path = data_dir / "logs" / "gateway.log"
        self._settings = dict(settings or {})
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._endpoint: Endpoint | None = None
        self._log_start = 0

    @property
    def endpoint(self) -> Endpoint:
        assert self._endpoint is not None, "the stack is not started"
        return self._endpoint

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the stack is not started"
        return self._process

    def client(self, *, timeout: float = 60.0) -> httpx.Client:
        """Return a client of the gateway's own API that sends the key."""
        return httpx.Client(
            base_url=f"{self.endpoint.url}/api/tandem/v1/",
            headers={"X-API-Key": self.endpoint.api_key},
            timeout=timeout,
        )

    def add_model(self, *, name: str, path: Path) -> None:
        """Register a base model with the gateway."""
        with self.client() as client:
            answer = client.post("models", json={"name": name, "path": str(path.resolve())})
            if answer.is_error:
                raise ValueError(answer.json().get("error", answer.text))

    def __enter__(self) -> Stack:
        try:
            self._start()
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

    def _start(self) -> None:
        try:
            self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.log_path.parent.mkdir(mode=0o700, exist_ok=True)
            log = open(self.log_path, "ab", opener=_private)  # noqa: SIM115 - closed below
        except OSError as error:
            raise unusable(self.data_dir, error) from error
        environment = dict(os.environ)
        environment |= {f"TANDEM_{key.upper()}": value for key, value in self._settings.items()}
        environment["TANDEM_DATA_DIR"] = str(self.data_dir)
        with log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gateway"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that Ctrl-C reaches it once, through stop()
                preexec_fn=die_with_parent,
            )
        deadline = time.monotonic() + self._start_timeout
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise WorkerStartFailed(f"the gateway did not start: {self.why_ended()}")
            endpoint = read_endpoint(self.data_dir)
            if endpoint is not None and endpoint.pid == self._process.pid and answers(endpoint):
                self._endpoint = endpoint
                return
            time.sleep(0.05)
        raise WorkerStartFailed(
            f"the gateway did not answer within {self._start_timeout:.0f} s; see {self.log_path}"
        )

    def why_ended(self) -> str:
        """Return, of a gateway that has ended, the sentence that it left; else how it ended."""
        with self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start if self._log_start <= size else 0, size - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        for line in reversed(lines):
            if line.startswith(SENTENCE):
                return f"{line.removeprefix(SENTENCE)} (log: {self.log_path})"
        status = self.process.wait()
        if status < 0:
            name = next((s.name for s in signal.Signals if s == -status), f"signal {-status}")
            memory = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
            return f"it was killed by {name}{memory} (log: {self.log_path})"
        return f"it exited with status {status}; see its log, {self.log_path}"

    def stop(self) -> None:
        """Stop the gateway and, through it, every worker. Idempotent."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(self._stop_timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._process = None
        self._endpoint = None


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
        return httpx.get(f"{endpoint.url}/api/v1/healthz", timeout=5).is_success
    except httpx.HTTPError:
        return False
