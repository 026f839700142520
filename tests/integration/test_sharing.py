"""Experiments on shared devices, trainers or engines give the same bits as alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.chaos.experiments import PROMPTS, TIMEOUT, Experiment, begin, end
from tests.support.stacks import GROUPS, TIED, TestStack, running, write_qwen
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_qwen(tmp_path_factory.mktemp("model") / "tied", seed=3)


@dataclass
class Alone:
    """Runs one experiment at a time, with its own workers, once for all tests."""

    model: Path
    folder: Path
    done: dict[tuple[str, int], Experiment] = field(default_factory=dict)

    def run_missing(self, experiments: Sequence[Experiment]) -> None:
        wanted = [(each.kind, each.number) for each in experiments]
        missing = [Experiment(*each) for each in wanted if each not in self.done]
        if missing:
            with running(self.folder / str(len(self.done)), models={TIED: self.model}) as stack:
                for experiment in missing:
                    end(begin(stack, [experiment], steps=STEPS), [experiment], steps=STEPS)
                    self.done[experiment.kind, experiment.number] = experiment


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory) -> Alone:
    return Alone(model, tmp_path_factory.mktemp("alone"))


def assert_as_alone(experiments: Sequence[Experiment], alone: Alone) -> None:
    alone.run_missing(experiments)
    for found in experiments:
        expected = alone.done[found.kind, found.number]
        assert found.steps == expected.steps, found.kind
        assert found.weights == expected.weights, found.kind


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("groups", "kinds"),
    [
        pytest.param(
            *("two", ("rl", "rl-full")), id="two on a core for training and one for sampling"
        ),
        pytest.param(
            *("two", ("rl", "rl-full", "full")),
            id="three on a core for training and one for sampling",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *("one", ("rl", "rl-full")), id="two on a single core", marks=pytest.mark.nightly
        ),
    ],
)
def test_time_sliced_equals_alone(groups, kinds, model, alone, tmp_path):
    experiments = [Experiment(kind) for kind in kinds]
    with running(
        tmp_path,
        models={TIED: model},
        settings={"groups": GROUPS[groups], "sharing_quantum": "0.2"},
    ) as stack:
        end(begin(stack, experiments, steps=STEPS), experiments, steps=STEPS)
        assert stack.reasons_of_ends() == {"it was released"}, "each worker slept in its turn"
    assert_as_alone(experiments, alone)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_without_host_memory_trainers_sleep_in_files_and_engines_drop_their_weights(
    model, alone, tmp_path
):
    experiments = [Experiment(kind) for kind in ("rl", "rl-full")]
    settings = {
        "groups": GROUPS["one"],
        "sharing_quantum": "0.2",
        "host_memory_bytes": str(2**20),
        "sharing_max_wait": "0.5",  # nothing fits anyway, and nothing has to wait for it
        "spill_dir": str(tmp_path / "spilled"),
    }
    with running(tmp_path, models={TIED: model}, settings=settings) as stack:
        threads = begin(stack, experiments, steps=STEPS)
        wait_until(lambda: spilled(stack) > 0, what="a trainer sleeps in a file", timeout=TIMEOUT)
        end(threads, experiments, steps=STEPS)
        # A sleeper may have to end for a worker that has waited for too long.
        assert stack.reasons_of_ends() <= {"it was released", "another worker needs its memory"}
    assert_as_alone(experiments, alone)
    assert not list((tmp_path / "spilled").iterdir()), "the files have no names"


def spilled(stack: TestStack) -> int:
    with stack.stack.client() as client:
        return client.get("groups").json()["groups"][0]["spilled_bytes"]


@dataclass
class Turn:
    """An experiment's turn to sample. The last step waits for the trainer's end, so that each
    experiment still needs it then."""

    one_samples: threading.Lock
    killed: threading.Event
    samples: int = 0

    def __enter__(self) -> None:
        self.samples += 1
        if self.samples > PROMPTS * (STEPS - 1):
            assert self.killed.wait(TIMEOUT)
        self.one_samples.acquire()

    def __exit__(self, *_: object) -> None:
        self.one_samples.release()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("runs", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_lora_runs_on_one_base_equal_those_alone_though_their_trainer_is_killed(
    model, alone, tmp_path, runs
):
    one_samples, killed = threading.Lock(), threading.Event()
    experiments = [Experiment("rl", each, Turn(one_samples, killed)) for each in range(runs)]
    with running(tmp_path, models={TIED: model}, settings={"sharing_lora_runs": "always"}) as stack:
        threads = begin(stack, experiments, steps=STEPS)
        wait_until(lambda: all(each.steps for each in experiments), what="each has done a step")
        workers = stack.status()["workers"]
        assert sorted(worker["kind"] for worker in workers) == ["sampler", "trainer"]
        os.kill(next(each["pid"] for each in workers if each["kind"] == "trainer"), signal.SIGKILL)
        killed.set()
        end(threads, experiments, steps=STEPS)
        log = stack.stack.log_path.read_text()
    assert_as_alone(experiments, alone)
    assert log.count("trainer_restored") == len(experiments)
