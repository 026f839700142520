"""The engine's process: executes the commands of the sampler's process, and computes ahead.

`engine_process.py` is the other end of the pipe."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NoReturn, cast

from sampler_service.engine import Engine, EngineRequest, EngineResult, StepOutput
from sampler_service.structured_output import Grammar, GrammarCache
from tandem.errors import TandemError, describe
from tandem.protocol.worker import die_with_parent
from tandem.settings.workers import SamplerSettings
from tandem.telemetry import configure_logging, get_log

Start = Callable[[Callable[[], None]], Engine]
"""Makes an engine. It calls its argument when one of its processes dies."""
PIPE = 3
"""The descriptor of a new program's pipe."""


@dataclass(frozen=True)
class Add:
    """Requests with the source of their grammars."""

    requests: list[tuple[EngineRequest, Grammar | None]]


@dataclass(frozen=True)
class Go:
    """Compute until a `settle`."""


@dataclass(frozen=True)
class EngineCall:
    method: str
    arguments: tuple[object, ...]
    named: dict[str, object]


@dataclass(frozen=True)
class EngineAnswer:
    """The return value of a call. The first one holds the engine's facts."""

    value: object


class EngineProcessEnded(Exception):
    """The engine's process has ended or hangs. The engine is lost."""


FromEngine = StepOutput | EngineAnswer | TandemError | EngineProcessEnded
"""Output, or the end of a call: its value, or its error, after which the engine continues."""


# --- The engine ---------------------------------------------------------------------------


def serve_engine(connection: Connection, start: Start, *, model: Path, parent: int) -> NoReturn:
    try:
        die_with_parent(parent)
        for number in (signal.SIGTERM, signal.SIGINT):  # the sampler ends both processes
            signal.signal(number, signal.SIG_IGN)
        EngineServer(connection, model=model).run(start)
    finally:
        os._exit(1)  # skips the clean-up of state shared with the parent


def main() -> NoReturn:
    """Make and serve an engine in a new process. See `EngineProcess.spawn`."""
    from sampler_service.vllm.start import start_engine

    model, settings, parent = sys.argv[1:]
    configure_logging(service="sampler", level="warning")
    start = partial(
        start_engine, Path(model), SamplerSettings.model_validate_json(settings), sleeps=True
    )
    serve_engine(Connection(PIPE), start, model=Path(model), parent=int(parent))


class EngineServer:
    def __init__(self, connection: Connection, *, model: Path) -> None:
        self._connection = connection
        self._grammars = GrammarCache(model)
        self._commands: SimpleQueue[list[EngineRequest | EngineResult] | Go | EngineCall] = (
            SimpleQueue()
        )
        self._computing = False
        self._unfinished: set[str] = set()

    def run(self, start: Start) -> None:
        threading.Thread(target=self._receive, name="commands", daemon=True).start()
        try:
            self._engine = start(partial(os._exit, 1))
            gc.freeze()
            gc.enable()
            self._send(EngineAnswer(self._engine.facts))
            while True:
                self._turn()
        except TandemError as error:  # only from the start
            self._send(error)
        except Exception as error:  # noqa: BLE001 (an engine may raise anything, and is lost then)
            get_log().exception("engine_failed")
            self._send(EngineProcessEnded(describe(error)))

    def _send(self, message: FromEngine) -> None:
        self._connection.send(message)

    def _receive(self) -> None:
        """Read all messages at once, so that the other end never waits to send.

        The process ends when the pipe closes."""
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, Add):
                    message = [self._compiled(*each) for each in message.requests]
                self._commands.put(message)
        except (EOFError, OSError):
            pass
        except BaseException:  # noqa: BLE001 - a panic of llguidance is no `Exception`
            get_log().exception("engine_failed")
        finally:
            os._exit(1)

    def _compiled(
        self, request: EngineRequest, grammar: Grammar | None
    ) -> EngineRequest | EngineResult:
        if grammar is None:
            return request
        facts = self._engine.facts
        try:
            compiled = self._grammars.compile(
                grammar, vocabulary=facts.vocabulary, end_tokens=facts.end_tokens
            )
        except TandemError as error:
            return EngineResult(id=request.id, samples=(), failure=error)
        return replace(request, grammar=compiled)

    def _turn(self) -> None:
        try:
            command = self._commands.get(block=not (self._computing and self._unfinished))
        except Empty:
            self._report(self._engine.step())
            return
        if isinstance(command, Go):
            self._computing = True
        elif isinstance(command, EngineCall):
            self._send(self._answer(command))
        else:
            self._add(command)

    def _add(self, requests: list[EngineRequest | EngineResult]) -> None:
        refused = StepOutput()
        for each in requests:
            if isinstance(each, EngineResult):
                refused.results.append(each)
                continue
            try:
                self._engine.add(each)
            except TandemError as error:
                refused.results.append(EngineResult(id=each.id, samples=(), failure=error))
            else:
                self._unfinished.add(each.id)
        if refused.results:
            self._report(refused)

    def _report(self, output: StepOutput) -> None:
        self._unfinished.difference_update(result.id for result in output.results)
        self._send(output)

    def _answer(self, call: EngineCall) -> EngineAnswer | TandemError:
        try:
            value = getattr(self._engine, call.method)(*call.arguments, **call.named)
        except TandemError as error:
            return error
        if call.method in ("settle", "finish"):
            self._computing = False
            self._unfinished.difference_update(result.id for result in value.results)
        elif call.method == "abort":
            self._unfinished.difference_update(cast("Sequence[str]", call.arguments[0]))
        return EngineAnswer(value)
