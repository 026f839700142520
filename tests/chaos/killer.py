"""A seeded killer: what it may do to a stack, and how it chooses."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from tests.support.stacks import TestStack

_FEW, _WITHIN = 3, 60.0
"""A stack whose gateway or agent ends five times within a minute ends, and says why."""


class Killer:
    def __init__(self, stack: TestStack, rng: random.Random) -> None:
        self._stack = stack
        self._rng = rng
        self._ends: dict[str, deque[float]] = {"gateway": deque(), "agent": deque()}

    def strike(self) -> str:
        """Do one thing, and return what it was."""
        faults: list[tuple[str, Callable[[], None]]] = [
            ("a process of a trainer is killed", self._kill_trainer),
            ("a trainer stands still for 4 s", self._freeze_trainer),
            ("the gateway stands still for 8 s", self._freeze_gateway),
        ]
        if self._may_end("gateway"):
            faults.append(("the gateway is killed", lambda: self._end("gateway")))
        if self._may_end("agent"):
            faults.append(("the agent is killed", lambda: self._end("agent")))
        if self._may_end("agent") and self._may_end("gateway"):
            faults.append(("all processes are killed", self._kill_all))
        name, fault = self._rng.choice(faults)
        fault()
        return name

    def _may_end(self, name: str) -> bool:
        ends, now = self._ends[name], time.monotonic()
        while ends and ends[0] < now - _WITHIN:
            ends.popleft()
        return len(ends) < _FEW

    def _end(self, name: str) -> None:
        self._ends[name].append(time.monotonic())
        stack = self._stack.stack
        (stack.process if name == "gateway" else stack.agent_process).kill()

    def _kill_all(self) -> None:
        for name in ("gateway", "agent"):
            self._end(name)
        for process in self._trainers():
            _signal(process, signal.SIGKILL)

    def _trainers(self) -> list[int]:
        found = [each for each in self._stack.processes() if "trainer_service" in each.command]
        return sorted(each.pid for each in found)

    def _kill_trainer(self) -> None:
        if trainers := self._trainers():
            _signal(self._rng.choice(trainers), signal.SIGKILL)

    def _freeze_trainer(self) -> None:
        if trainers := self._trainers():
            _freeze(self._rng.choice(trainers), 4.0)

    def _freeze_gateway(self) -> None:
        _freeze(self._stack.stack.process.pid, 8.0)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _freeze(pid: int, seconds: float) -> None:
    _signal(pid, signal.SIGSTOP)
    time.sleep(seconds)
    _signal(pid, signal.SIGCONT)
