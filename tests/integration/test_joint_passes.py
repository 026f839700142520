"""LoRA runs that share passes equal those alone, though an idle process replaces their trainer."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, field

import numpy as np
import pytest
from tinker import ServiceClient, TrainingClient
from tinker.types import ForwardBackwardOutput

from tests.support.sdk import TIMEOUT, adam, outputs, sequences, supervised
from tests.support.stacks import TIED, TestStack, running, write_qwen
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RUNS, STEPS = 3, 6


@dataclass
class Run:
    """A run whose data and adapter depend on its number."""

    number: int
    client: TrainingClient
    _pending: list = field(default_factory=list)

    @classmethod
    def create(cls, service: ServiceClient, number: int) -> Run:
        creating = service.create_lora_training_client(TIED, rank=4 + number, seed=number)
        return cls(number, creating.result(TIMEOUT))

    def send(self, steps: range) -> None:
        for step in steps:
            drawn = sequences(16, seed=10 * step + self.number)
            data = [supervised(each) for each in drawn]
            self._pending.append(self.client.forward_backward(data, "cross_entropy"))
            self._pending.append(self.client.optim_step(adam()))

    def result(self, stack: TestStack) -> Result:
        """Wait for all steps, and publish the weights."""
        batches = [each.result(TIMEOUT) for each in self._pending][::2]
        self.client.save_weights_for_sampler("end").result(TIMEOUT)
        return Result(batches, stack.published(self.client))


@dataclass
class Result:
    batches: list[ForwardBackwardOutput]
    weights: dict[str, np.ndarray]

    def assert_as(self, alone: Result) -> None:
        assert len(self.batches) == len(alone.batches) == STEPS
        for ours, theirs in zip(self.batches, alone.batches, strict=True):
            assert ours.metrics["loss:sum"] == theirs.metrics["loss:sum"]
            for one, other in zip(outputs(ours), outputs(theirs), strict=True):
                np.testing.assert_array_equal(one, other)
        assert self.weights.keys() == alone.weights.keys()
        for name, tensor in alone.weights.items():
            np.testing.assert_array_equal(self.weights[name], tensor, err_msg=name)


def trainer_of(stack: TestStack) -> int:
    """Return the process id of the only trainer."""
    workers = stack.status()["workers"]
    (pid,) = [each["pid"] for each in workers if each["kind"] == "trainer"]
    return pid


def events(stack: TestStack, event: str, *, log: str) -> list[dict]:
    logs = (stack.data_dir / "logs").glob(f"{log}.log")
    lines = [line for each in logs for line in each.read_text().splitlines()]
    return [json.loads(line) for line in lines if f'"event":"{event}"' in line]


def joint_passes(stack: TestStack) -> list[dict]:
    return events(stack, "joint_pass", log="trainer-*")


def idle_process(stack: TestStack) -> int:
    """Wait for an idle process that is no trainer yet. Return its process id."""

    def ready() -> set[int]:
        found = {each["pid"] for each in events(stack, "idle_process_ready", log="agent")}
        return found - {trainer_of(stack)}

    (pid,) = wait_until(ready, what="a process is idle")
    return pid


def test_runs_that_share_passes_equal_those_alone_though_an_idle_process_replaces_their_trainer(
    tmp_path,
):
    with (
        running(
            tmp_path / "data",
            models={TIED: write_qwen(tmp_path / "tied", seed=3)},
            settings={"sharing_lora_runs": "always", "pool_processes": "1"},
            agent="tests.support.pooling_agent",
        ) as stack,
        stack.service() as service,
    ):
        # Created at first, because a run after a published one would start an engine.
        single, together = ([Run.create(service, n) for n in range(RUNS)] for _ in range(2))
        alone = []
        for run in single:
            run.send(range(STEPS))
            alone.append(run.result(stack))
        assert not joint_passes(stack)

        trainer, idle = trainer_of(stack), idle_process(stack)
        for step in range(STEPS // 2):
            for run in together:
                run.send(range(step, step + 1))
        wait_until(lambda: joint_passes(stack), what="runs have shared a pass")
        os.kill(trainer, signal.SIGKILL)
        for run in together:
            run.send(range(STEPS // 2, STEPS))
        for run, expected in zip(together, alone, strict=True):
            run.result(stack).assert_as(expected)
        assert trainer_of(stack) == idle
