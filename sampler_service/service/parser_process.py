"""The process that parses answers, and the sampler's end of its pipe.

Some of vLLM's parsers take minutes for a strange answer, and a thread cannot be ended. So
`RLIMIT_CPU` ends their process, and the answer is content. The process is forked from one that has
imported vLLM, so its successor is ready in milliseconds."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sampler_service.vllm.parsers import MessageParser, ParsedAnswer
from tandem.errors import InternalError, TandemError, describe, from_type
from tandem.telemetry import get_log
from tandem.v1 import sampler_pb2

_SECONDS = 5
"""Processor time for one answer. The last part of a stream may take as much again."""
_PATIENCE = 120.0
"""Seconds of the clock for a reply, together with the start of the process."""
_KILL_SECONDS = 10.0
_MOST_ANSWERS = 1024
"""Streams with a state in the process. Others are parsed again from their beginning."""
_ENDED = b""
"""The reply in place of one from a process that ended."""

_MODULE = "sampler_service.service.parser_process"

Push = tuple[Sequence[int], bool]


class ParserProcess:
    """Parses the answers of one model. Thread-safe. The process starts at the first use, which
    takes seconds."""

    def __init__(self, model: Path, end_tokens: Sequence[int], *, seconds: int = _SECONDS) -> None:
        self.seconds = seconds
        self._arguments = [str(model), json.dumps([*end_tokens]), str(seconds)]
        self._lock = threading.Lock()
        self._numbers = count()
        self._connection: Connection | None = None
        self._stop: Callable[[], object] = lambda: None

    def open_answer(self, request: sampler_pb2.SampleRequest) -> AnswerInProcess:
        return AnswerInProcess(self, next(self._numbers), request.SerializeToString())

    def exchange(self, asked: dict[str, object], request: bytes) -> dict[str, Any] | None:
        """Return the reply, or None if the process ended. Raises the parser's `TandemError`."""
        with self._lock:
            number = next(self._numbers)
            try:
                connection = self._running()
                connection.send_bytes(json.dumps({**asked, "number": number}).encode())
                connection.send_bytes(request)
                reply = _receive(connection, number)
            except (OSError, EOFError) as error:
                get_log().warning("parser_process_failed", reason=describe(error))
                self.close()
                return None
        if reply is not None and (failure := reply.get("failure")):
            raise from_type(*failure)
        return reply

    def close(self) -> None:
        self._connection = None
        self._stop()

    def _running(self) -> Connection:
        if self._connection is None:
            ours, theirs = Pipe()
            child = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno()), *self._arguments],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
            self._stop = weakref.finalize(self, _kill, child, ours)
            self._connection = ours
        return self._connection


class AnswerInProcess:
    """A `ParsedAnswer` in the process."""

    def __init__(self, process: ParserProcess, key: int, request: bytes) -> None:
        self._process = process
        self._key = key
        self._request = request
        self._pushes: list[Push] = []
        self._plain = False
        self._known = False
        """Whether the process may have the state."""
        self._seconds = 0.0

    def check(self) -> None:
        """Raises as `MessageParser.open_answer`."""
        self._parse([])

    def whole(self, tokens: Sequence[int]) -> str:
        return self._parse([(list(tokens), True)], whole=True)

    def push(self, tokens: Sequence[int], *, finished: bool) -> str:
        self._pushes.append((list(tokens), finished))
        if self._known:
            reply = self._exchange(self._pushes[-1:], begin=False)
            if reply is not None and "message" in reply:
                return str(reply["message"])
        return self._parse(self._pushes)

    def _parse(self, pushes: Sequence[Push], *, whole: bool = False) -> str:
        """Parse from the beginning, and as content if that ends the process. Raises
        `InternalError`."""
        reply = self._exchange(pushes, whole=whole)
        if reply is None:
            reply = self._exchange(pushes, whole=whole)
        if reply is None:
            raise InternalError("the process that parses answers does not run; see the log")
        return str(reply["message"])

    def _exchange(
        self, pushes: Sequence[Push], *, begin: bool = True, whole: bool = False
    ) -> dict[str, Any] | None:
        asked = {"answer": self._key, "plain": self._plain, "pushes": pushes, "whole": whole}
        reply = self._process.exchange(asked, self._request if begin else b"")
        if reply is not None:
            self._known, self._seconds = True, self._seconds + reply["seconds"]
        if not self._plain and (reply is None or self._seconds > self._process.seconds):
            self._plain, self._known = True, False
        return reply


def _receive(connection: Connection, number: int) -> dict[str, Any] | None:
    """Raises `OSError` if no reply comes in time."""
    while connection.poll(_PATIENCE):
        if (content := connection.recv_bytes()) == _ENDED:
            return None
        reply: dict[str, Any] = json.loads(content)
        if reply["number"] == number:  # others are replies to a request before an end
            return reply
    raise TimeoutError(f"no reply within {_PATIENCE:g} s")


def _kill(child: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_KILL_SECONDS)


# --- The process itself ---------------------------------------------------------------------------


def main() -> None:
    """Serve the sampler until it closes the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the sampler handles them
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    descriptor, model, end_tokens, seconds = sys.argv[1:]
    connection = Connection(int(descriptor))
    parser = MessageParser(Path(model), json.loads(end_tokens))
    parser.import_libraries()
    while True:
        if (child := os.fork()) == 0:
            _serve(connection, parser, int(seconds))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        with contextlib.suppress(OSError):  # the sampler has ended, which the next one notices
            connection.send_bytes(_ENDED)


def _serve(connection: Connection, parser: MessageParser, seconds: int) -> None:
    answers: OrderedDict[int, ParsedAnswer] = OrderedDict()
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    while True:
        try:
            asked, request = json.loads(connection.recv_bytes()), connection.recv_bytes()
        except (EOFError, OSError):
            return
        began = time.process_time()
        most = math.ceil(began) + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (most, hard))
        try:
            reply = _reply(parser, answers, asked, request)
        except TandemError as error:
            reply = {"failure": [error.type, error.message]}
        except Exception as error:  # noqa: BLE001 - a library raises anything
            reply = {
                "failure": [InternalError.type, f"an answer was not parsed: {describe(error)}"]
            }
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
        used = {"number": asked["number"], "seconds": time.process_time() - began}
        connection.send_bytes(json.dumps({**reply, **used}).encode())


def _reply(
    parser: MessageParser,
    answers: OrderedDict[int, ParsedAnswer],
    asked: dict[str, Any],
    request: bytes,
) -> dict[str, object]:
    """Return the message of the last tokens, or nothing for an answer without a state."""
    key, said = asked["answer"], ""
    if request:
        message = sampler_pb2.SampleRequest.FromString(request)
        answers[key] = parser.open_answer(message, plain=asked["plain"])
    elif key not in answers:
        return {}
    answer = answers.pop(key)
    for tokens, finished in asked["pushes"]:
        if asked["whole"]:
            return {"message": answer.whole(array("i", tokens))}
        said = answer.push(array("i", tokens), finished=finished)
        if finished:
            return {"message": said}
    if asked["pushes"]:
        answers[key] = answer
        if len(answers) > _MOST_ANSWERS:
            answers.popitem(last=False)
    return {"message": said}


if __name__ == "__main__":
    main()
