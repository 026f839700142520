"""One pass for several LoRA runs computes what each run's own pass computes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.protocol.worker import LoraSpec, TrainingSpec
from tandem.v1 import common_pb2, trainer_pb2
from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.local_trainer import batch_of, data_of, forward_backward, gradients, make_rank
from tests.support.tiny_model import VOCABULARY
from tests.support.trainer_worker import datum, request
from tests.unit.trainer.test_sharing import assert_same_weights, host, optim_step
from trainer_service.batches.validation import Batch
from trainer_service.compute.joint import JointBatch, fits, forward_backward_together
from trainer_service.compute.trainer import RankTrainer
from trainer_service.optimizers import AdamWSettings
from trainer_service.service import joint_calls
from trainer_service.service.batch_call import BatchCall
from trainer_service.service.engine_thread import EngineThread
from trainer_service.service.hosted_runs import HostedRuns

SPECS = [
    LoraSpec(rank=4, seed=5),
    LoraSpec(rank=2, seed=6, alpha=8, mlp=False),
    LoraSpec(rank=7, seed=7, attention=False, unembedding=False),
    LoraSpec(rank=3, seed=8, attention=False, mlp=False),
]


STEP = AdamWSettings(
    learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.5
)


def trainers(model: Path, **settings: object) -> list[RankTrainer]:
    first = make_rank(model, SPECS[0], **settings)
    others = [first.share(TrainingSpec(lora=lora), run=n) for n, lora in enumerate(SPECS[1:], 1)]
    return [first, *others]


def batches(runs: list[RankTrainer], *, round: int, loss: str = "cross_entropy") -> list[Batch]:
    return [
        batch_of(run, request(data_of(10 * round + number, count=12 + number), loss=loss))
        for number, run in enumerate(runs)
    ]


def joined(runs: list[RankTrainer], given: list[Batch]) -> list[JointBatch]:
    found = [run.joint_batch(batch) for run, batch in zip(runs, given, strict=True)]
    assert all(found)
    return [one for one in found if one is not None]


@pytest.mark.parametrize("logits_bytes", [0, 4096])
@pytest.mark.parametrize("parallel", [0, 2])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_joint_pass_has_the_bits_of_each_runs_own_pass(
    models, architecture, parallel, logits_bytes
):
    settings = {"parallel": parallel, "logits_bytes": logits_bytes}
    together, alone = (trainers(models[architecture], **settings) for _ in range(2))
    for round in range(2):
        given = joined(together, batches(together, round=round))
        found = forward_backward_together(given)
        assert found is not None
        for run, other, batch, mine, results in zip(
            together, alone, batches(alone, round=round), given, found, strict=True
        ):
            result = run.combined(mine.batch, mine.plan, results)
            other.backend.activate()
            expected = other.forward_backward(batch)
            assert expected is not None
            assert np.array_equal(result.logprobs, expected.logprobs)
            assert (result.metrics, result.sums) == (expected.metrics, expected.sums)
            expected_gradients = gradients(other)
            found_gradients = gradients(run)
            assert found_gradients.keys() == expected_gradients.keys()
            assert all(
                torch.equal(found_gradients[name], gradient)
                for name, gradient in expected_gradients.items()
            )
            for each in (run, other):
                each.backend.activate()
                each.optim_step(STEP)


class Waiting:
    """An engine thread that begins when all jobs are queued."""

    def __init__(self, runs: HostedRuns, monkeypatch: pytest.MonkeyPatch) -> None:
        self._begin = threading.Event()
        self.passes: list[int] = []
        self.engine = EngineThread(start=lambda: runs, heartbeat=1.0, on_broken=self._broken)
        self.engine.run()
        self.engine.submit(lambda _: self._begin.wait(60))
        self._calls: list[BatchCall] = []
        self._found: list[Future[trainer_pb2.ForwardBackwardReply]] = []

        def counted(together: Sequence[JointBatch]) -> object:
            self.passes.append(len(together))
            return forward_backward_together(together)

        monkeypatch.setattr(joint_calls, "forward_backward_together", counted)

    def _broken(self, error: BaseException) -> None:
        raise error

    def send(self, run: str, data: Sequence[wire.Datum]) -> None:
        message = trainer_pb2.ForwardBackwardRequest(
            header=common_pb2.OperationHeader(run_id=run),
            payload=request(data).SerializeToString(),
        )
        call = BatchCall(message)
        self.engine.read_ahead(call)
        self._calls.append(call)
        job = self.engine.submit(
            lambda runs: call.compute(runs.take_turn(run)), run_id=run, call=call
        )
        self._found.append(job)

    def step(self, run: str) -> None:
        self.engine.submit(lambda runs: optim_step(runs.take_turn(run), clip=0.5), run_id=run)

    def replies(self) -> list[trainer_pb2.ForwardBackwardReply]:
        wait([call.read for call in self._calls if call.read], timeout=60)
        self._begin.set()
        return [job.result(60) for job in self._found]


def parsed(reply: trainer_pb2.ForwardBackwardReply) -> wire.ForwardBackwardOutput:
    """A reply's output. Messages are compared, because maps have no order in bytes."""
    return wire.ForwardBackwardOutput.FromString(reply.output)


@pytest.fixture
def hosts(models):
    return [host(models["qwen3"], "a", "b", "c", parallel=2) for _ in range(2)]


def test_waiting_batches_of_several_runs_are_computed_in_one_pass(hosts, monkeypatch):
    shared, alone = hosts
    waiting = Waiting(shared, monkeypatch)
    sent = [
        (run, data_of(10 * round + seed, count=12))
        for round in range(2)
        for seed, run in enumerate("abc")
    ]
    for number, (run, data) in enumerate(sent):
        waiting.send(run, data)
        if number < 3:
            waiting.step(run)
    found = waiting.replies()
    for number, (run, data) in enumerate(sent):
        operations = alone.take_turn(run)
        assert parsed(found[number]) == forward_backward(operations, data)
        if number < 3:
            optim_step(operations, clip=0.5)
    assert waiting.passes == [3, 3]
    for run in "abc":
        assert_same_weights(shared.operations_of(run), alone.operations_of(run))


def test_a_refused_batch_fails_its_run_alone(hosts, monkeypatch):
    shared, alone = hosts
    waiting = Waiting(shared, monkeypatch)
    wrong = datum([1, VOCABULARY, 2], weights=np.ones(3))
    sent = [("a", data_of(1, count=12)), ("b", [wrong]), ("c", data_of(2, count=12))]
    for run, data in sent:
        waiting.send(run, data)
    found = waiting.replies()
    assert found[1].HasField("failure")
    assert waiting.passes == [2]
    for number in (0, 2):
        run, data = sent[number]
        assert parsed(found[number]) == forward_backward(alone.take_turn(run), data)


def test_no_batch_passes_a_job_of_all_runs(hosts, monkeypatch):
    waiting = Waiting(hosts[0], monkeypatch)
    waiting.send("a", data_of(1, count=12))
    waiting.engine.submit(lambda runs: None)
    waiting.send("b", data_of(2, count=12))
    assert not any(reply.HasField("failure") for reply in waiting.replies())
    assert waiting.passes == []


def test_a_pass_that_fails_is_computed_run_by_run(hosts, monkeypatch):
    shared, alone = hosts
    waiting = Waiting(shared, monkeypatch)
    backend = type(shared.operations_of("a").trainer.backend)

    def without_memory(*given: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(backend, "losses_of", without_memory)
    for run in "ab":
        waiting.send(run, data_of(3, count=12))
    found = waiting.replies()
    assert waiting.passes == [2]
    for run, reply in zip("ab", found, strict=True):
        assert parsed(reply) == forward_backward(alone.take_turn(run), data_of(3, count=12))


def test_a_pass_holds_no_more_than_a_micro_batch(models):
    runs = trainers(models["qwen3"], micro_batch_tokens=256)
    together = joined(runs, batches(runs, round=0))
    assert fits(together[:1])
    assert fits(together) == (sum(sum(each.sizes) for each in together) <= 256)
    assert not fits(together * 3)


def test_experts_and_tiny_batches_have_passes_of_their_own(models):
    moe = make_rank(models["qwen3_moe"], LoraSpec(rank=4, seed=5, mlp=False))
    assert moe.joint_batch(batch_of(moe, request(data_of(1, count=12)))) is None
    dense = make_rank(models["qwen3"], SPECS[0])
    assert dense.joint_batch(batch_of(dense, request(data_of(1, count=1)))) is None
