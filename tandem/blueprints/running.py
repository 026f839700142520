"""Runs a blueprint's program in a process of its own, and checks its numbers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tandem.agent.exits import killed_by
from tandem.blueprints.description import Blueprint, Value
from tandem.blueprints.program import ProgramEnd, ProgramRequest

_SLOWER = 10.0
"""The factor of the usual time after which a run ends."""
_STOP_SECONDS = 10.0
_LOOK_SECONDS = 2.0
_STDERR = 2


@dataclass(frozen=True)
class BlueprintResult:
    """`violations` has a sentence for each number that is missing or beyond its bound. `error` is
    the reason of a program that returned no numbers. `weights` is the path of the tuned weights, ""
    if the program saved none, and `runs` are the ids of its runs."""

    blueprint: str
    model: str
    values: Mapping[str, Value]
    seconds: float
    numbers: Mapping[str, float]
    violations: Mapping[str, str]
    error: str = ""
    weights: str = ""
    runs: Sequence[str] = ()

    @property
    def sound(self) -> bool:
        return not self.error and not self.violations


def run_blueprint(
    blueprint: Blueprint,
    *,
    model: str,
    values: Mapping[str, Value],
    seed: int,
    environment: Mapping[str, str],
    timeout: float | None = None,
    goes_on: Callable[[], bool] = lambda: True,
) -> BlueprintResult:
    """Train a blueprint, and return its result. Its output goes to standard error.

    `environment` is the program's, and names the gateway. `timeout` is in seconds, by default ten
    times the blueprint's usual time. `goes_on` is called every few seconds, and ends the program by
    False. The process ends with this one, and its session without a heartbeat."""
    timeout = timeout or _SLOWER * 60 * blueprint.needs.minutes
    began = time.monotonic()
    with tempfile.TemporaryFile() as file:
        request = ProgramRequest(
            folder=blueprint.folder,
            model=model,
            values=dict(values),
            seed=seed,
            deadline=timeout,
            result=file.fileno(),
            parent=os.getpid(),
        )
        fault = _run(request, dict(environment), timeout, goes_on)
        file.seek(0)
        said = file.read()
    end = ProgramEnd.model_validate_json(said) if said else ProgramEnd(error=fault)
    return BlueprintResult(
        blueprint=blueprint.name,
        model=model,
        values=values,
        seconds=round(time.monotonic() - began, 1),
        numbers=end.numbers,
        violations={} if end.error else violations_of(blueprint, end.numbers),
        error=end.error,
        weights=end.weights,
        runs=end.runs,
    )


def violations_of(blueprint: Blueprint, numbers: Mapping[str, float]) -> dict[str, str]:
    """Return a sentence for each number that is missing or beyond its bound."""
    found: dict[str, str] = {}
    for name, bound in blueprint.metrics.items():
        if name not in numbers:
            found[name] = "the program returned no such number"
        elif not bound.allows(numbers[name]):
            found[name] = f"{numbers[name]:g}, and {bound} is expected"
    return found


def _run(
    request: ProgramRequest,
    environment: dict[str, str],
    timeout: float,
    goes_on: Callable[[], bool],
) -> str:
    """Return how the program ended, for one without a result."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tandem.blueprints.program"],
        stdin=subprocess.PIPE,
        stdout=_STDERR,
        pass_fds=[request.result],
        env=environment,
        text=True,
    )
    try:
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(request.model_dump_json())
        if fault := _wait(process, timeout, goes_on):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            return fault
    finally:
        process.kill()
        process.wait()
    status = process.returncode
    how = f"was killed by {killed_by(status)}" if status < 0 else f"ended with status {status}"
    return f"its process {how}"


def _wait(process: subprocess.Popen[str], timeout: float, goes_on: Callable[[], bool]) -> str:
    """Wait for the program. Return why it must end, "" if it has ended."""
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        try:
            process.wait(min(left, _LOOK_SECONDS))
            return ""
        except subprocess.TimeoutExpired:
            if not goes_on():
                return "it was ended"
    return f"it did not end within {timeout:g} s"
