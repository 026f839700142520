"""An engine in its own process, which computes while this process answers.

`EngineProcess` implements `Engine`. It forks a process that makes the real engine
(`engine_server.py`), and imports no engine code.

The engine computes until `settle`, so `step` returns the output of one or more steps and never
waits long. Requests added between two steps arrive together. All other calls wait for their answer,
in order, so all earlier output is known then.

The engine's process ends with this one: the kernel kills it (`die_with_parent`). If it ends by
itself, the engine is lost."""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, cast

from sampler_service.engine import (
    Engine,
    EngineFacts,
    EngineMemory,
    EngineRequest,
    StepOutput,
)
from sampler_service.service.engine_server import (
    PIPE,
    Add,
    EngineAnswer,
    EngineCall,
    EngineProcessEnded,
    FromEngine,
    Go,
    Start,
    serve_engine,
)
from sampler_service.vllm.environment import engine_environment
from sampler_service.vllm.memory import resident_bytes
from tandem.errors import TandemError
from tandem.settings.workers import SamplerSettings

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")

_STEP_SECONDS = 1.0
"""The longest wait of `step`."""
_END_SECONDS = 10.0
_PROGRAM = "from sampler_service.service.engine_server import main; main()"


def _asks(
    method: Callable[Concatenate[Engine, Arguments], Value],
) -> Callable[Concatenate[EngineProcess, Arguments], Value]:
    """Return a method that the engine in the process carries out."""

    def ask(
        process: EngineProcess, /, *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Value:
        return process._call(method, *arguments, **named)

    return ask


class EngineProcess:
    """Use: `process = EngineProcess.fork(start, model=model, patience=1800)` while this process has
    one thread, later `process.connect(on_lost)`."""

    facts: EngineFacts

    def __init__(self, pid: int, connection: Connection, *, patience: float) -> None:
        self._pid = pid
        self._connection = connection
        self._patience = patience
        self._computing = False
        self._heard_at = time.monotonic()
        self._added: list[EngineRequest] = []
        self._ahead = StepOutput()
        self._status: int | None = None
        self._on_end: Callable[[], None] = lambda: None
        self._watcher = threading.Thread(target=self._watch, name="engine process", daemon=True)
        self._watcher.start()

    @classmethod
    def fork(cls, start: Start, *, model: Path, patience: float) -> EngineProcess:
        """Fork a process that makes the model's engine by `start`.

        `patience` limits its start, each call and each step, in seconds."""
        ours, theirs = Pipe()
        _limit_waits(ours, patience)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            serve_engine(theirs, start, model=model, parent=parent)
        theirs.close()
        return cls(pid, ours, patience=patience)

    @classmethod
    def spawn(cls, model: Path, settings: SamplerSettings) -> EngineProcess:
        """Start a program that makes the model's engine. This process may have threads and a GPU.

        The program ends with the calling thread."""
        ours, theirs = Pipe()
        _limit_waits(ours, settings.operation_timeout)
        pid = os.posix_spawn(
            sys.executable,
            [
                sys.executable,
                "-c",
                _PROGRAM,
                str(model),
                settings.model_dump_json(),
                f"{os.getpid()}",
            ],
            engine_environment(),
            file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), PIPE)],
        )
        theirs.close()
        return cls(pid, ours, patience=settings.operation_timeout)

    def connect(self, on_lost: Callable[[], None]) -> EngineProcess:
        """Wait for the engine and return it. Raises the errors of `start`, and
        `EngineProcessEnded`.

        `on_lost` is called in another thread if the process ends later."""
        self.facts = cast("EngineFacts", self._answer("its start"))
        self._on_end = on_lost
        if self._status is not None:
            on_lost()
        return self

    def kill_engine(self) -> None:
        """Kill the process, and wait until its memory is free."""
        self._on_end = lambda: None
        if self._status is None:
            with suppress(ProcessLookupError):  # the watcher notes its end only now
                os.kill(self._pid, signal.SIGKILL)
        self._watcher.join(_END_SECONDS)

    def _watch(self) -> None:
        _, self._status = os.waitpid(self._pid, 0)
        self._on_end()

    # --- Engine

    def add(self, request: EngineRequest) -> None:
        self._added.append(request)

    def step(self) -> StepOutput:
        self._send_added()
        if not self._computing:
            self._send(Go())
            self._computing = True
        seconds = 0.0 if self._ahead != StepOutput() else _STEP_SECONDS
        while self._receive(seconds) is not None:
            seconds = 0.0
        if time.monotonic() - self._heard_at > self._patience:
            raise self._stands_still("end a step")
        return self._take_ahead()

    def settle(self) -> StepOutput:
        if not self._computing:
            return self._take_ahead()
        last = self._call(Engine.settle)
        self._computing = False
        _append(self._ahead, last)
        return self._take_ahead()

    def abort(self, ids: Sequence[str]) -> None:
        self._call(Engine.abort, ids)
        ahead, gone = self._ahead, set(ids)
        self._ahead = StepOutput(
            results=[each for each in ahead.results if each.id not in gone],
            begun=[id_ for id_ in ahead.begun if id_ not in gone],
            deltas=[each for each in ahead.deltas if each.id not in gone],
        )

    finish = _asks(Engine.finish)
    pause = _asks(Engine.pause)
    resume = _asks(Engine.resume)
    carry_over = _asks(Engine.carry_over)
    load = _asks(Engine.load)
    load_handoff = _asks(Engine.load_handoff)
    weight_sums = _asks(Engine.weight_sums)
    sleep = _asks(Engine.sleep)
    wake_weights = _asks(Engine.wake_weights)
    wake_cache = _asks(Engine.wake_cache)
    reset_prefix_cache = _asks(Engine.reset_prefix_cache)
    score = _asks(Engine.score)
    add_adapter = _asks(Engine.add_adapter)
    remove_adapter = _asks(Engine.remove_adapter)

    def memory(self) -> EngineMemory:
        """On a CPU, the sum of both processes."""
        theirs = self._call(Engine.memory)
        if self.facts.device != "cpu":
            return theirs
        return replace(theirs, device=theirs.device + resident_bytes())

    # --- Messages

    def _call(
        self,
        method: Callable[Concatenate[Engine, Arguments], Value],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Value:
        self._send_added()
        self._send(EngineCall(method.__name__, arguments, named))
        return cast("Value", self._answer(method.__name__))

    def _send_added(self) -> None:
        if self._added:
            self._send(
                Add(
                    [
                        (replace(each, grammar=None), each.grammar.source if each.grammar else None)
                        for each in self._added
                    ]
                )
            )
            self._added = []

    def _send(self, message: Add | Go | EngineCall) -> None:
        self._heard_at = time.monotonic()  # no answer is due before this
        try:
            self._connection.send(message)
        except BlockingIOError as error:
            raise self._stands_still("read what it is told") from error
        except OSError as error:
            raise self._ended() from error

    def _answer(self, what: str) -> object:
        """Return the answer to the last call, and keep the output computed before it."""
        deadline = time.monotonic() + self._patience
        while (left := deadline - time.monotonic()) > 0:
            message = self._receive(left)
            if isinstance(message, TandemError):
                raise message
            if isinstance(message, EngineAnswer):
                return message.value
        raise self._stands_still(f"end {what}")

    def _receive(self, seconds: float) -> FromEngine | None:
        """Return the next message, or None after `seconds`."""
        try:
            if not self._connection.poll(seconds):
                return None
            message: FromEngine = self._connection.recv()
        except BlockingIOError as error:
            raise self._stands_still("end an answer") from error
        except (EOFError, OSError) as error:
            raise self._ended() from error
        self._heard_at = time.monotonic()
        if isinstance(message, EngineProcessEnded):
            raise message
        if isinstance(message, StepOutput):
            _append(self._ahead, message)
        return message

    def _take_ahead(self) -> StepOutput:
        ahead, self._ahead = self._ahead, StepOutput()
        return ahead

    def _stands_still(self, what: str) -> EngineProcessEnded:
        return EngineProcessEnded(f"its process did not {what} within {self._patience:g} s")

    def _ended(self) -> EngineProcessEnded:
        self._watcher.join(_END_SECONDS)
        code = None if self._status is None else os.waitstatus_to_exitcode(self._status)
        how = f"was killed by signal {-code}" if code and code < 0 else f"ended with status {code}"
        return EngineProcessEnded(f"its process {how}")


def _limit_waits(connection: Connection, seconds: float) -> None:
    """Limit the wait for a stopped process, which neither reads nor ends.

    A write to a full pipe, or a read of half a message, raises `BlockingIOError` then."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as pipe:
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _append(output: StepOutput, more: StepOutput) -> None:
    output.results.extend(more.results)
    output.begun.extend(more.begun)
    output.deltas.extend(more.deltas)
    output.loads.extend(more.loads)
