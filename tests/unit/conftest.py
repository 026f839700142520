"""A unit test fails if it starts a process, opens a port or imports vLLM."""

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
    """Audits this process (PEP 578) during each unit test.

    An audit hook cannot be removed, so one hook raises only while a test runs. Native code raises
    no events: the fixture replaces gRPC's and uvicorn's servers and the start of multiprocessing.
    """

    def __init__(self) -> None:
        self.found: list[str] | None = None
        sys.addaudithook(self._audit)

    def refuse(self, what: str) -> None:
        """Fail the running test, even if it catches this exception."""
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
