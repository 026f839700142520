"""The process that computes custom losses, and the two ends of its pipe.

A graph comes from a client, and a single operation can take any memory and time. The system bounds
both: `RLIMIT_AS` refuses memory, and `RLIMIT_CPU` ends the process. The limit is processor time, so
that a busy machine refuses no loss that an idle one accepts. A message is a JSON object, then the
bytes of its tensors."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from tandem.custom_losses.graph import Graph, read_custom_loss
from tandem.custom_losses.implementations import DTYPES
from tandem.custom_losses.interpreter import Interpreter
from tandem.errors import CustomLossFailed, describe

_Json = dict[str, object]
_LENGTH = struct.Struct("<Q")
_START_SECONDS = 120.0
_KILL_SECONDS = 10.0

_PATIENCE = 10.0
"""Seconds of the clock for each second of a processor, in addition to `_START_SECONDS`. A busy
machine is slow, but no trainer may wait for ever."""
_RECYCLED_ABOVE = 2**28
"""The bytes of leftovers at which a process is replaced."""


@dataclass(frozen=True)
class Limits:
    """`memory`: bytes for one datum's graph. `seconds`: processor time for all graphs of a request
    on one rank."""

    memory: int = 2**30
    seconds: float = 30.0


@dataclass(frozen=True)
class GraphEvaluation:
    """The `losses` of some datums, float64.

    `gradients` are their derivatives by the logprobs, if requested. `metrics` are sums, in the
    graph's order. `seconds` is processor time."""

    losses: Tensor
    gradients: Sequence[Tensor]
    metrics: tuple[float, ...]
    seconds: float


# --- The trainer's end ----------------------------------------------------------------------------


class LossProcess:
    """The process of one rank, started with the first graph and after an end.

    Calls from several threads take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], object] = lambda: None

    def evaluate(
        self,
        graph: Graph,
        definition: bytes,
        datums: Sequence[Sequence[Tensor]],
        *,
        gradient: bool,
        limits: Limits,
        used: float,
    ) -> GraphEvaluation:
        """Compute the graph on each datum.

        A datum's tensors are on the host, in the order of the graph's inputs. `definition` is the
        graph's body. `used` is the processor time of the request's other datums, in seconds. Raises
        only `CustomLossFailed`, because the caller's peers may be in a collective."""
        request: _Json = {
            "gradient": gradient,
            "memory": limits.memory,
            "seconds": limits.seconds - used,
            "inputs": len(graph.inputs),
        }
        body = torch.frombuffer(bytearray(definition), dtype=torch.uint8)
        tensors = [body, *(tensor for datum in datums for tensor in datum)]
        with self._lock:
            child = self._running(graph.name)
            began = time.monotonic()
            reply = _exchange(child, request, tensors, seconds=limits.seconds)
            if reply is None or reply[0]["last"]:
                self._child = None
                self._stop()
        if reply is None:
            late = time.monotonic() - began >= _patience(limits.seconds)
            why = _cause(child.returncode, limits, late=late)
            raise CustomLossFailed(f"the custom loss {graph.name!r} failed: {why}")
        answer, [losses, *gradients] = reply
        if failure := answer.get("failure"):
            raise CustomLossFailed(str(failure))
        numbers = answer["numbers"]
        assert isinstance(numbers, list)
        seconds, *metrics = map(float, numbers)
        return GraphEvaluation(
            losses=losses, gradients=gradients, metrics=tuple(metrics), seconds=seconds
        )

    def close(self) -> None:
        with self._lock:
            self._child = None
            self._stop()

    def _running(self, name: str) -> subprocess.Popen[bytes]:
        """Raises `CustomLossFailed` for the loss `name`."""
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._stop()  # closes the pipes of an ended process
        failed = f"the custom loss {name!r} failed: its process could not start"
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )
        except OSError as error:  # no memory, or too many processes
            raise CustomLossFailed(f"{failed}: {describe(error)}") from error
        self._stop = weakref.finalize(self, _kill, child)
        if _exchange(child, {}, [], seconds=0.0) is None:
            self._stop()
            raise CustomLossFailed(f"{failed} ({child.returncode})")
        self._child = child
        return child


def _exchange(
    child: subprocess.Popen[bytes],
    request: _Json,
    tensors: Sequence[Tensor],
    *,
    seconds: float,
) -> tuple[_Json, list[Tensor]] | None:
    """Return the reply of the process, or None if it ends."""
    assert child.stdin is not None and child.stdout is not None
    patience = threading.Timer(_patience(seconds), child.kill)
    patience.daemon = True
    patience.start()
    try:
        _send(child.stdin, request, tensors)
        return _receive(child.stdout)
    except (OSError, EOFError):
        return None
    finally:
        patience.cancel()


def _patience(seconds: float) -> float:
    """Return the limit on the clock for a request, in seconds."""
    return _START_SECONDS + _PATIENCE * seconds


def _cause(code: int, limits: Limits, *, late: bool) -> str:
    """Return the reason of the process's end. `late`: it exceeded the limit on the clock."""
    if code == -signal.SIGXCPU:
        return f"it took more than {limits.seconds:g} s of processor time on the request's datums"
    if late:
        return (
            f"it did not end within {_patience(limits.seconds):g} s, in which it got less than "
            f"{limits.seconds:g} s of processor time; the machine is busy, try again"
        )
    return (
        f"its process ended ({code}): it may have taken more memory than {limits.memory >> 20} MiB "
        "for a datum"
    )


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a hanging disk
        child.wait(_KILL_SECONDS)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # nobody reads the rest of a message
                pipe.close()


# --- Messages -------------------------------------------------------------------------------------


def _send(stream: IO[bytes], message: _Json, tensors: Sequence[Tensor]) -> None:
    plain = [tensor.detach().contiguous() for tensor in tensors]
    described = [[str(each.dtype).removeprefix("torch."), list(each.shape)] for each in plain]
    text = json.dumps({**message, "tensors": described}).encode()
    stream.write(_LENGTH.pack(len(text)) + text)
    for each in plain:
        stream.write(_content(each))
    stream.flush()


def _receive(stream: IO[bytes]) -> tuple[_Json, list[Tensor]]:
    """Raises `EOFError` if the other end has ended."""
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    message: _Json = json.loads(_exactly(stream, length))
    described = message["tensors"]
    assert isinstance(described, list)
    tensors = []
    for dtype, shape in described:
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        content, done = _content(tensor), 0
        while done < len(content):
            read = stream.readinto(content[done:])  # type: ignore[attr-defined]
            if not read:
                raise EOFError
            done += read
        tensors.append(tensor)
    return message, tensors


def _exactly(stream: IO[bytes], count: int) -> bytes:
    content = stream.read(count)
    if len(content) < count:
        raise EOFError
    return content


def _content(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


# --- The process itself ---------------------------------------------------------------------------


def main() -> None:
    """Serve the parent process until it closes the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the trainer handles them, and closes the pipe
        signal.signal(number, signal.SIG_IGN)
    source = os.fdopen(os.dup(0), "rb")
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print there
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # the kernel ends this process before the trainer
        Path("/proc/self/oom_score_adj").write_text("1000")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    most = _size() + _RECYCLED_ABOVE
    while True:
        try:
            request, tensors = _receive(source)
        except EOFError:
            return
        answer, results = _evaluate(request, tensors) if tensors else ({}, [])
        del tensors
        _send(target, {**answer, "last": _size() > most}, results)


def _evaluate(request: _Json, tensors: list[Tensor]) -> tuple[_Json, list[Tensor]]:
    graph = _read(bytes(_content(tensors[0])))
    gradient, count, memory = (request[name] for name in ("gradient", "inputs", "memory"))
    assert isinstance(count, int) and isinstance(memory, int)
    seconds = max(0.0, float(str(request["seconds"])))
    began = time.process_time()
    interpreter = Interpreter(graph, deadline=began + seconds)
    losses: list[float] = []
    gradients: list[Tensor] = []
    sums = [0.0] * len(graph.metrics)
    _limit(resource.RLIMIT_CPU, math.ceil(began + seconds) + 1)
    if size := _size():
        _limit(resource.RLIMIT_AS, size + memory)
    try:
        for start in range(1, len(tensors), count):
            result = interpreter.compute_graph(
                tensors[start : start + count], gradient=bool(gradient)
            )
            losses.append(result.loss)
            if result.gradient is not None:
                gradients.append(result.gradient)
            sums = [a + result.metrics[name] for a, name in zip(sums, graph.metrics, strict=True)]
    except CustomLossFailed as error:
        return {"failure": error.message}, [torch.zeros(0)]
    finally:
        _limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)
        _limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
    used = time.process_time() - began
    return {"numbers": [used, *sums]}, [torch.tensor(losses, dtype=torch.float64), *gradients]


@functools.lru_cache(maxsize=1)
def _read(definition: bytes) -> Graph:
    return read_custom_loss(definition)


def _limit(kind: int, most: int) -> None:
    """Set a soft limit, within the hard limit."""
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        most = hard if most == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, hard))


def _size() -> int:
    """Return this process's address space in bytes, or 0 if the system does not report, and so not
    limit, it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except FileNotFoundError:
        return 0
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
