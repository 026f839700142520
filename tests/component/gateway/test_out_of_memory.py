"""Trainers that run out of memory."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from tandem.v1 import trainer_pb2
from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.gateway.fake_trainer import FakeTrainer
from tests.support.gateway.runs import SELDOM, Run, train, undisturbed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_wait")


def test_an_operation_that_runs_out_of_memory_is_computed_in_smaller_parts_and_so_replayed(start):
    class Small(FakeTrainer):
        memory = MappingProxyType({3: 600})

    launcher = FakeLauncher(Small)
    with start(recovery=SELDOM, launcher=launcher) as gate:
        run = Run.new(gate)
        train(run, 1, 2)
        assert len([spec for spec in launcher.specs if spec.kind == "trainer"]) == 3
        assert run.newest.history == undisturbed(2)

        def restored() -> tuple[int, int]:
            (status,) = run.client.get("/api/tandem/v1/status").json()["runs"]
            return status["restored"], status["micro_batch_tokens"]

        assert restored() == (2, 512)
        run.die()
        wait_until(lambda: restored() == (3, 512))
        train(run, 3)
        assert run.newest.history == undisturbed(3)
        batches = [
            request
            for request in run.newest.requests
            if isinstance(request, trainer_pb2.ForwardBackwardRequest)
        ]
        assert [request.micro_batch_tokens for request in batches] == [2048, 512, 0]
        told = [(request.out_of_memory_at, request.checkpoint) for request in batches]
        assert told == [(0, True), (1024, True), (0, False)]


def test_an_operation_that_needs_too_much_memory_is_refused_again_when_it_is_replayed(start):
    class Small(FakeTrainer):
        memory = MappingProxyType({1: 0})

    launcher = FakeLauncher(Small)
    with start(recovery=SELDOM, launcher=launcher) as gate:
        run = Run.new(gate)
        run.backward(1)
        refused = run.outcome(1).json()
        assert (refused["type"], refused["error"]) == (
            "out_of_memory",
            "out_of_memory: one sequence is too long",
        )
        run.backward(2)
        assert run.outcome(2).status_code == 200
        run.die()
        run.backward(3)
        assert run.outcome(3).status_code == 200
        assert [seq for _, seq in run.newest.applied] == [1, 2, 3]
        why = "at 2048, 1024 and 512 tokens; checkpointed; refused; killed"
        assert len(launcher.servicers) == 6, why


def test_a_replay_that_runs_out_of_memory_goes_on_in_smaller_parts(start):
    class Shrinking(FakeTrainer):
        """The first trainer has more memory than the others."""

        def __init__(self, spec) -> None:
            super().__init__(spec)
            self.memory = {1: 1500} if launcher.servicers else {}

    launcher = FakeLauncher(Shrinking)
    with start(recovery=SELDOM, launcher=launcher) as gate:
        run = Run.new(gate)
        for number, trainers in ((1, 1), (2, 3), (3, 4)):
            train(run, number)
            assert len(launcher.servicers) == trainers
            assert run.newest.history == undisturbed(number)
            run.die()


def test_a_trainer_that_never_tries_smaller_micro_batches_ends_the_run(start):
    class Stubborn(FakeTrainer):
        memory = MappingProxyType({1: 0})

        async def ForwardBackward(self, request, context):
            request.out_of_memory_at = 0
            return await super().ForwardBackward(request, context)

    with start(recovery=SELDOM, launcher=FakeLauncher(Stubborn)) as gate:
        run = Run.new(gate)
        run.backward(1)
        refused = run.outcome(1).json()
        assert refused["type"] == "worker_died"
        assert "died 3 times at operation 1" in refused["error"]
        assert "rank 1 ran out of memory" in refused["error"]
