"""A gateway dies at any moment, and a trainer beside it. The run's results equal an undisturbed
run's.

The numbers in a test's name decide everything that happens. `make nightly` runs some thousands."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.gateway.crash_client import (
    Script,
    alone,
    batch,
    empty_forward,
    endless_batch,
    export,
    forward,
    large_batch,
    late,
    load,
    long_batch,
    missing,
    poison,
    publish,
    random_script,
    refused,
    save,
    save_for_sampler,
    step,
    unreadable,
)
from tests.support.gateway.crash_scenarios import Left, Life, Scenario

OFTEN = {"share": 1.0, "replay": 0.0}
"""As many snapshots as possible."""
SELDOM = {"share": 1e-9, "replay": 1e6}
OVERFLOWING = SELDOM | {"log_bytes": 0}
"""No run can be restored before its next snapshot."""
SCRIPTS: Mapping[str, Script] = {
    "training": [batch(1), step(), large_batch(2), forward(), step(), batch(3), step(), forward()],
    "saves": [
        *(batch(1), step(), save("a"), publish(0), batch(2), step(), save("a", overwrite=True)),
        *(save_for_sampler("b"), load("a"), batch(3), export("c"), step(), forward()),
    ],
    "refusals": [
        *(batch(1), refused("forward_backward"), empty_forward(), forward(), step(), batch(2)),
        *(unreadable(), step(), step()),
        *(load("none"), refused(), batch(3), missing(), late(step()), alone(batch(4)), step()),
        *(batch(5), step(), forward()),
    ],
    "versions": [
        *(publish(0), batch(1), step(), publish(1), save_for_sampler("b"), batch(2), step()),
        *(publish(2), batch(3), step(), publish(3), export("c"), publish(4)),
    ],
    "a save after a refusal": [
        *(batch(1), step(), refused("forward_backward"), save("a"), batch(2), step(), batch(3)),
        *(step(), forward()),
    ],
    "a refusal long ago": [
        *(batch(1), step(), refused("forward_backward"), alone(step()), alone(batch(2))),
        *(alone(step()), alone(batch(3)), alone(step()), alone(batch(4)), alone(step()), forward()),
    ],
}
PARTS = 25
FEW = range(0, PARTS, 3)


@functools.cache
def undisturbed(name: str) -> tuple[Left, Scenario]:
    with TemporaryDirectory() as folder:
        scenario = Scenario(script_of(name), Path(folder, "data"), seed=1)
        return scenario.run(), scenario


def script_of(name: str) -> Script:
    return SCRIPTS[name] if name in SCRIPTS else random_script(random.Random(int(name)))


def die_at(steps: int, name: str, folder: Path, **how) -> None:
    scenario = Scenario(script_of(name), folder, lives=[Life(steps)], seed=1, **how)
    expected, _ = undisturbed(name)
    assert not scenario.run().differences(expected), f"the gateway died before step {steps}"


@pytest.mark.parametrize("part", FEW)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_gateway_may_die_anywhere(name, part, tmp_path):
    steps = undisturbed(name)[1].steps[0]
    die_at(1 + (7 * part + steps * part) // PARTS, name, tmp_path / "data")


def test_a_gateway_may_die_while_it_writes_a_file(tmp_path):
    _, scenario = undisturbed("training")
    assert scenario.files
    for number in scenario.files:
        die_at(number, "training", tmp_path / f"{number}")


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_gateway_may_die_at_every_step(name, part, tmp_path):
    steps = undisturbed(name)[1].steps[0]
    for number in range(1 + part, steps, PARTS):
        die_at(number, name, tmp_path / f"{number}")


def die_at_without_a_log(steps: int, name: str, folder: Path) -> None:
    """The trainer outlives the gateway, which must adopt it."""
    scenario = Scenario(
        script_of(name),
        folder,
        lives=[Life(steps, outlived=True)],
        seed=1,
        settings={"recovery": OVERFLOWING},
    )
    expected, _ = undisturbed(name)
    assert not scenario.run().differences(expected), f"the gateway died before step {steps}"


# At these steps, refused operations had just ended in the gateway, or calls waited at the trainer
# for a lost one.
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *(("a refusal long ago", steps) for steps in (172, 307, 334, 379, 442, 487, 541)),
        *(("refusals", steps) for steps in (305, 361, 1161)),
        ("training", 321),
    ],
)
def test_a_trainer_is_adopted_where_the_calls_did_not_fit_into_the_log(name, steps, tmp_path):
    die_at_without_a_log(steps, name, tmp_path / "data")


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_trainer_is_adopted_whatever_did_not_fit_into_the_log(name, part, tmp_path):
    steps = undisturbed(name)[1].steps[0]
    for number in range(1 + part, steps, PARTS):
        die_at_without_a_log(number, name, tmp_path / f"{number}")


def die_again_and_again(seed: int, folder: Path, *, sharing: int = 1) -> None:
    """`sharing` sessions share one trainer."""
    rng = random.Random(seed)
    name = rng.choice([*SCRIPTS, str(seed)])
    longest = rng.choice((100, 400, 1500))
    names = [name, *(rng.choice([*SCRIPTS, f"{seed + 1}"]) for _ in range(sharing - 1))]
    scenario = Scenario(
        script_of(name),
        folder / "data",
        beside=[script_of(each) for each in names[1:]],
        seed=seed,
        lives=[
            Life(
                rng.randrange(1, longest),
                planned=rng.random() < 0.2,
                outlived=rng.random() < 0.5,
            )
            for _ in range(rng.randrange(1, 7))
        ],
        trouble=rng.random() < 0.5,
        settings={
            "recovery": rng.choice((OFTEN, SELDOM, {})),
            "dispatch_window": rng.choice((1, 2, 4)),
            "max_queued_operations": rng.choice((2, 1000)),
        },
    )
    for each, left in zip(names, scenario.run_all(), strict=True):
        expected, _ = undisturbed(each)
        assert not left.differences(expected), each


@pytest.mark.parametrize("seed", [*range(15), 20180])
def test_gateways_and_workers_may_die_again_and_again(seed, tmp_path):
    die_again_and_again(seed, tmp_path)


def test_a_batch_that_kills_every_trainer_ends_its_own_run_alone(tmp_path):
    others = ("training", "saves")
    script = [batch(1), step(), poison(), step()]
    scenario = Scenario(script, tmp_path / "data", beside=[script_of(each) for each in others])
    left, *beside = scenario.run_all()
    assert left.outcomes[3].startswith("worker_died: the trainer died 3 times at operation 3")
    for name, other in zip(others, beside, strict=True):
        assert not other.differences(undisturbed(name)[0])


def test_a_batch_that_hangs_ends_its_own_run_alone(tmp_path):
    others = ("training", "saves")
    script = [batch(1), step(), endless_batch(), step()]
    scenario = Scenario(script, tmp_path / "data", beside=[script_of(each) for each in others])
    left, *beside = scenario.run_all()
    assert left.outcomes[3].startswith("operation_timed_out: the trainer did not end the operation")
    for name, other in zip(others, beside, strict=True):
        assert not other.differences(undisturbed(name)[0])


@pytest.mark.parametrize(
    "steps",
    [
        *range(60, 160, 24),
        *(pytest.param(steps, marks=pytest.mark.nightly) for steps in range(72, 160, 24)),
    ],
)
def test_runs_come_and_go_beside_one_that_is_at_long_operations(steps, tmp_path):
    others = ("training", "a save after a refusal")
    scenario = Scenario(
        [*(long_batch(1), step(), long_batch(2), step(), long_batch(3), step(), forward())],
        tmp_path / "data",
        beside=[script_of(each) for each in others],
        lives=[Life(steps, outlived=True)],
        seed=steps,
    )
    _, *beside = scenario.run_all()
    for name, other in zip(others, beside, strict=True):
        assert not other.differences(undisturbed(name)[0])
    started = [e["worker_id"] for e in scenario.log if e["event"] == "worker_ready"]
    assert len([each for each in started if each.startswith("trainer-")]) == 1


SCALED = [batch(1), step(), publish(0), forward()]
GROUPS = [
    {"name": "t", "devices": ["cpu:0"], "roles": ["trainer"]},
    *(
        {"name": f"s{core}", "devices": [f"cpu:{core}"], "roles": ["sampler"], "workers": 1}
        for core in range(1, 5)
    ),
]


def scaled_while_gateways_die(seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    scenario = Scenario(
        SCALED,
        folder / "data",
        seed=seed,
        scales=[rng.randint(1, 4) for _ in range(rng.randint(1, 4))],
        lives=[
            Life(rng.randrange(60, 800), planned=rng.random() < 0.2, outlived=rng.random() < 0.7)
            for _ in range(rng.randrange(1, 6))
        ],
        settings={"groups": GROUPS if rng.random() < 0.8 else []},
    )
    scenario.run()


@pytest.mark.parametrize("seed", range(10))
def test_engines_are_as_many_as_were_asked_for_last_whenever_gateways_die(seed, tmp_path):
    scaled_while_gateways_die(seed, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10, 1000))
def test_engines_are_so_thousands_of_times(seed, tmp_path):
    scaled_while_gateways_die(seed, tmp_path)


@pytest.mark.parametrize("seed", range(10))
def test_so_may_they_where_runs_share_a_trainer(seed, tmp_path):
    die_again_and_again(seed, tmp_path, sharing=2 + seed % 3)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10, 1500))
def test_so_may_they_thousands_of_times_where_runs_share_a_trainer(seed, tmp_path):
    die_again_and_again(seed, tmp_path, sharing=2 + seed % 3)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(15, 2500))
def test_gateways_and_workers_may_die_thousands_of_times(seed, tmp_path):
    die_again_and_again(seed, tmp_path)
