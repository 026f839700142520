"""A run of chaos: two experiments at once, faults, and the comparison with undisturbed ones."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.experiments import TIMEOUT, Experiment
from tests.chaos.killer import Killer
from tests.support.files import tree
from tests.support.stacks import TIED, TestStack, running, write_qwen
from tests.support.waiting import wait_until


@dataclass(frozen=True)
class Struck:
    """A fault, and the seconds after it until every experiment had its next result."""

    what: str
    seconds: float


def run_chaos(
    folder: Path,
    *,
    faults: int,
    seed: int,
    ranks: int = 1,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Struck]:
    """Raise `AssertionError` where something is not as in an undisturbed run, or is left."""
    rng = random.Random(seed)
    model = write_qwen(folder / "model", seed=seed)
    settings = {"trainer_ranks": str(ranks), "trainer_collective_timeout": "30"}
    with running(folder / "data", models={TIED: model}, settings=settings) as stack:
        disturbed = [Experiment("full", lora=False), Experiment("lora", lora=True)]
        threads = [_start(stack, each) for each in disturbed]
        struck: list[Struck] = []
        try:
            _progress(disturbed)
            killer = Killer(stack, rng)
            for number in range(faults):
                time.sleep(rng.random() * 2)
                began = time.monotonic()
                what = killer.strike()
                _progress(disturbed)
                struck.append(Struck(what, time.monotonic() - began))
                tell(f"{number + 1}: {what}: {struck[-1].seconds:.1f} s until the next results")
        finally:
            for each in disturbed:
                each.stop.set()
            for thread in threads:
                thread.join(TIMEOUT)
        for each in disturbed:
            if each.fault is not None:
                raise AssertionError(f"{each.name} failed (seed {seed})") from each.fault
            undisturbed = Experiment(each.name, lora=each.lora)
            _start(stack, undisturbed, exactly=len(each.steps)).join(TIMEOUT + len(each.steps))
            assert undisturbed.fault is None, undisturbed.fault
            different = [
                step
                for step, (one, other) in enumerate(zip(each.steps, undisturbed.steps, strict=True))
                if one != other
            ]
            assert not different, f"{each.name}: steps {different} differ (seed {seed})"
            assert each.weights == undisturbed.weights, f"{each.name} (seed {seed})"
            tell(f"{each.name}: {len(each.steps)} steps, as in an undisturbed run")
        _nothing_left(stack)
    return struck


def _start(stack: TestStack, each: Experiment, exactly: int | None = None) -> threading.Thread:
    def work() -> None:
        with stack.service() as service:
            each.run(service, exactly=exactly)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _progress(experiments: list[Experiment]) -> None:
    """Wait until each has a result of something that it sent after this call."""
    goals = [len(each.steps) + 4 for each in experiments]  # those before were sent ahead

    def all_there() -> bool:
        for each in experiments:
            if each.fault is not None:
                raise AssertionError(f"{each.name} failed") from each.fault
        return all(len(e.steps) >= goal for e, goal in zip(experiments, goals, strict=True))

    wait_until(all_there, what="every experiment goes on", timeout=TIMEOUT)


def _nothing_left(stack: TestStack) -> None:
    """Of the runs, whose sessions have ended."""
    wait_until(
        lambda: not any("_service" in each.command for each in stack.processes()),
        what="no worker is left",
    )
    for name in ("snapshots", "operations", "weights"):
        folder = stack.data_dir / name
        wait_until(
            lambda folder=folder: not any(each.is_file() for each in tree(folder)),
            what=f"nothing is left in {name}",
        )
