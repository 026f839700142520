from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.experiments import TIMEOUT, Experiment
from tests.chaos.killer import SETTINGS, Killer
from tests.chaos.machine import Machine, machine
from tests.support.files import tree
from tests.support.stacks import GROUPS, TIED, write_qwen
from tests.support.waiting import wait_until


@dataclass(frozen=True)
class Struck:
    """A fault, and the seconds until every experiment had its next result."""

    what: str
    seconds: float


def run_chaos(
    folder: Path,
    *,
    faults: int,
    seed: int,
    ranks: int = 1,
    kinds: Sequence[str] = ("full", "rl"),
    only: Sequence[str] = (),
    groups: str = GROUPS["none"],
    share: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Struck]:
    """Strike experiments that share the device `groups`. With `share`, LoRA experiments also share
    a trainer and an engine. Raise `AssertionError` if a result differs, or anything is left."""
    rng = random.Random(seed)
    model = write_qwen(folder / "model", seed=seed)
    settings = {
        **SETTINGS,
        "trainer_ranks": str(ranks),
        "groups": groups,
        "sharing_lora_runs": "always" if share else "never",
    }
    with machine(folder, models={TIED: model}, settings=settings) as where:
        turn = threading.Lock() if share else nullcontext()
        disturbed = [Experiment(kind, number, turn) for number, kind in enumerate(kinds)]
        threads = [_start(where, each) for each in disturbed]
        struck: list[Struck] = []
        try:
            _progress(disturbed)
            killer = Killer(where, seed=seed, only=only)
            for number in range(faults):
                # A fault may come at any moment, also during the recovery from the last one.
                time.sleep(rng.random() * 2)
                what = killer.choose()
                tell(f"{number + 1}: {what}")
                began = time.monotonic()
                killer.strike(what)
                _progress(disturbed)
                struck.append(Struck(what, time.monotonic() - began))
                tell(f"{number + 1}: {struck[-1].seconds:.1f} s until the next results")
        finally:
            for each in disturbed:
                each.stop.set()
            for thread in threads:
                thread.join(TIMEOUT)
        undisturbed = _same(where, disturbed, tell)
        _nothing_left(where, [*disturbed, *undisturbed])
    return struck


def _start(where: Machine, each: Experiment, exactly: int | None = None) -> threading.Thread:
    def work() -> None:
        with where.service() as service:
            each.run(service, exactly=exactly)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _progress(experiments: list[Experiment]) -> None:
    """Wait until each experiment has a result of a step after this call."""
    goals = [each.sent + 1 for each in experiments]

    def all_there() -> bool:
        _no_fault(experiments)
        return all(len(e.steps) >= goal for e, goal in zip(experiments, goals, strict=True))

    wait_until(all_there, what="every experiment goes on", timeout=TIMEOUT)


def _no_fault(experiments: list[Experiment]) -> None:
    for each in experiments:
        if each.fault is not None:
            raise AssertionError(f"{each.kind} failed at step {len(each.steps)}") from each.fault


def _same(
    where: Machine, disturbed: list[Experiment], tell: Callable[[str], None]
) -> list[Experiment]:
    """Repeat all experiments without faults. Compare each result, bit for bit."""
    _no_fault(disturbed)
    undisturbed = [Experiment(each.kind, each.number, each.turn) for each in disturbed]
    counts = [len(each.steps) for each in disturbed]
    threads = [_start(where, e, exactly=n) for e, n in zip(undisturbed, counts, strict=True)]
    for thread, count in zip(threads, counts, strict=True):
        thread.join(TIMEOUT + count)
    _no_fault(undisturbed)
    for one, other in zip(disturbed, undisturbed, strict=True):
        steps = enumerate(zip(one.steps, other.steps, strict=True), 1)
        different = [number for number, (here, there) in steps if here != there]
        assert not different, f"{one.kind}: steps {different} differ"
        assert one.weights == other.weights, f"{one.kind}: the final weights differ"
        tell(f"{one.kind}: {len(one.steps)} steps, as in an undisturbed run")
    return undisturbed


_ACTIVE = (
    "sessions WHERE state = 'active'",
    "runs WHERE state = 'active'",
    "workers WHERE state <> 'ended'",
    "operations WHERE state = 'accepted' OR payload IS NOT NULL OR call IS NOT NULL",
    "snapshots",
    "sampling_sessions WHERE state = 'active'",
    "weight_versions WHERE collected_at IS NULL",
    "released_folders",
)


def _nothing_left(where: Machine, experiments: list[Experiment]) -> None:
    """Ended runs may leave only their saved checkpoints."""
    wait_until(lambda: not where.found("_service", "VLLM"), what="no worker is left")
    status = where.ask("api/tandem/v1/status").json()
    for name in ("sessions", "runs", "samplers", "workers"):
        assert not status[name], status[name]
    for name in ("snapshots", "operations", "weights"):
        folder = where.data_dir / name
        wait_until(
            lambda folder=folder: not any(each.is_file() for each in tree(folder)),
            what=f"nothing is left in {name}",
        )
    uri = f"file:{where.data_dir / 'tandem.db'}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as database:
        for what in _ACTIVE:
            count = f"SELECT count(*) FROM {what}"
            wait_until(
                lambda count=count: database.execute(count).fetchone() == (0,),
                what=f"there are no {what}",
            )
        for each in experiments:  # a step that is applied twice is recorded once
            steps = "SELECT count(*) FROM training_steps WHERE run_id = ?"
            assert database.execute(steps, [each.run_id]).fetchone() == (len(each.steps),)
        rows = database.execute("SELECT path, folder FROM checkpoints").fetchall()
    assert {path for path, _ in rows} == {each.saved for each in experiments if each.saved}
    folders = {where.data_dir / folder for _, folder in rows}
    found = {each for each in (where.data_dir / "checkpoints").glob("*/*") if each.is_dir()}
    assert found == folders, found ^ folders
