"""Unit tests start no process, open no port and import no engine: a test that does fails here."""

from __future__ import annotations

import multiprocessing.process
import sys
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
import uvicorn

_PROCESSES = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.system"}


class Guard:
    """Audits this process (PEP 578) for the length of each unit test.

    An audit hook cannot be removed, so there is one, which raises only while a test runs. What
    native code does raises no event: gRPC's and uvicorn's servers are replaced instead, and what
    starts a process of multiprocessing.
    """

    def __init__(self) -> None:
        self.found: list[str] | None = None
        sys.addaudithook(self._audit)

    def refuse(self, what: str) -> None:
        """Fail the running test, also where it catches the exception that this raises."""
        if self.found is not None:
            self.found.append(what)
            raise RuntimeError(f"a unit test {what}; it belongs in tests/component")

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.found is None:
            return
        if event in _PROCESSES:
            self.refuse(f"starts a process ({event})")
        elif event == "socket.bind":
            self.refuse(f"opens a port ({arguments[1]!r})")
        elif event == "import" and str(arguments[0]).partition(".")[0] == "vllm":
            self.refuse("imports vllm")


@pytest.fixture(scope="session")
def unit_guard() -> Guard:
    return Guard()


@pytest.fixture(autouse=True)
def unit_test(unit_guard: Guard, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that starts a process, opens a port or imports vLLM."""

    def refusing(what: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: unit_guard.refuse(what)

    monkeypatch.setattr(grpc, "server", refusing("opens a port (grpc.server)"))
    monkeypatch.setattr(grpc.aio, "server", refusing("opens a port (grpc.aio.server)"))
    monkeypatch.setattr(uvicorn.Server, "serve", refusing("opens a port (uvicorn)"))
    process = multiprocessing.process.BaseProcess
    monkeypatch.setattr(process, "start", refusing("starts a process (multiprocessing)"))
    unit_guard.found = found = []
    yield
    unit_guard.found = None
    assert not found, f"a unit test {' and '.join(found)}; it belongs in tests/component"
