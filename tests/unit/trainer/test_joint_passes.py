"""One pass for several LoRA runs computes what each run's own pass computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.errors import LossInputShape
from tandem.protocol.worker import LoraSpec, TrainingSpec
from tandem.v1 import common_pb2, trainer_pb2
from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.local_trainer import (
    assert_same,
    batch_of,
    data_of,
    forward_backward,
    gradients,
    make_rank,
)
from tests.support.losses.batches import REQUESTS, mixed_data, mixed_request
from tests.support.tiny_model import VOCABULARY
from tests.support.trainer_worker import datum, request
from tests.unit.trainer.test_sharing import assert_same_weights, host, optim_step
from trainer_service import losses
from trainer_service.backends.base import Gradients, TrainerBackend
from trainer_service.backends.loop import ShareResult, compute_joint_shares
from trainer_service.batches.validation import Batch
from trainer_service.compute import joint
from trainer_service.compute.joint import JointBatch, fits, forward_backward_together
from trainer_service.compute.trainer import RankTrainer
from trainer_service.losses.base import LossResult
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


def assert_as_alone(
    together: list[RankTrainer],
    alone: list[RankTrainer],
    of_round: Callable[[list[RankTrainer]], list[Batch]],
) -> None:
    """Compute a pass and each run's own, compare bit by bit, and make a step."""
    given = joined(together, of_round(together))
    found = forward_backward_together(given)
    assert found is not None
    for run, other, batch, mine, results in zip(
        together, alone, of_round(alone), given, found, strict=True
    ):
        result = run.combined(mine.batch, mine.plan, results)
        other.backend.activate()
        expected = other.forward_backward(batch)
        assert expected is not None
        assert np.array_equal(result.logprobs, expected.logprobs), batch.loss.name
        assert (result.metrics, result.sums) == (expected.metrics, expected.sums)
        assert_same(gradients(run), gradients(other))
        for each in (run, other):
            each.backend.activate()
            each.optim_step(STEP)


@pytest.mark.parametrize("logits_bytes", [0, 4096])
@pytest.mark.parametrize("parallel", [0, 2])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_joint_pass_has_the_bits_of_each_runs_own_pass(
    models, architecture, parallel, logits_bytes
):
    settings = {"parallel": parallel, "logits_bytes": logits_bytes}
    together, alone = (trainers(models[architecture], **settings) for _ in range(2))
    for round in range(2):
        assert_as_alone(together, alone, partial(batches, round=round))


def mixed(runs: list[RankTrainer], *, names: Sequence[str]) -> list[Batch]:
    """Return a batch of one of these requests for each run."""
    return [
        batch_of(run, mixed_request(name, mixed_data(seed=number)))
        for number, (run, name) in enumerate(zip(runs, names, strict=True))
    ]


@pytest.mark.parametrize("logits_bytes", [0, 4096])
@pytest.mark.parametrize("parallel", [0, 2])
def test_runs_with_different_losses_have_the_bits_of_their_own_passes(
    models, parallel, logits_bytes
):
    settings = {"parallel": parallel, "logits_bytes": logits_bytes}
    together, alone = (trainers(models["qwen3"], **settings) for _ in range(2))
    names = ["cross_entropy", "importance_sampling", "ppo", "dpo"]
    if logits_bytes:
        names[-1] = "cispo"
    for first in range(len(names)):
        assert_as_alone(together, alone, partial(mixed, names=names[first:] + names[:first]))


def test_each_loss_has_the_bits_of_each_runs_own_pass(models):
    together, alone = (trainers(models["qwen3"], parallel=2)[:2] for _ in range(2))
    for name in REQUESTS:
        assert_as_alone(together, alone, partial(mixed, names=[name] * len(together)))


def test_with_logits_in_chunks_losses_of_whole_sequences_have_passes_of_their_own(models):
    run = make_rank(models["qwen3"], SPECS[0], logits_bytes=4096)
    for name in ("dpo", "gspo", "importance_sampling, geometric"):
        assert run.joint_batch(batch_of(run, mixed_request(name))) is None


def held(runs: list[RankTrainer]) -> list[dict[str, torch.Tensor]]:
    """Compute a batch of each run alone. Return the gradients."""
    for run, batch in zip(runs, batches(runs, round=0), strict=True):
        run.backend.activate()
        run.forward_backward(batch)
    return [gradients(run) for run in runs]


@pytest.mark.parametrize("logits_bytes", [0, 4096])
def test_a_pass_that_fails_in_one_of_its_threads_leaves_the_gradients_of_all_runs(
    models, monkeypatch, logits_bytes
):
    together, alone = (
        trainers(models["qwen3"], parallel=2, logits_bytes=logits_bytes) for _ in range(2)
    )
    before = held(together)
    assert held(alone)
    passes = count()

    def failing(*given: Any, **more: Any) -> list[ShareResult]:
        found = compute_joint_shares(*given, **more)
        if next(passes) == 1:
            raise RuntimeError("the second share fails")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(joint, "compute_joint_shares", failing)
        assert forward_backward_together(joined(together, batches(together, round=1))) is None
    assert next(passes) == 2, "both shares were computed"
    for run, expected in zip(together, before, strict=True):
        assert_same(gradients(run), expected)
    assert_as_alone(together, alone, partial(batches, round=1))


def test_a_backward_pass_that_fails_halfway_leaves_the_gradients_of_all_runs(models):
    """As when a GPU's memory runs out. Each run then computes its batch alone."""
    together, alone = (trainers(models["qwen3"], parallel=0) for _ in range(2))
    before = held(together)
    assert held(alone)

    def run_out(gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    hook = together[1].backend.trained[0].register_hook(run_out)  # of the first layer
    assert forward_backward_together(joined(together, batches(together, round=1))) is None
    hook.remove()
    for run, expected in zip(together, before, strict=True):
        assert_same(gradients(run), expected)
    assert_as_alone(together, alone, partial(batches, round=1))


def fail_at(at: int, monkeypatch: pytest.MonkeyPatch, backend: type[TrainerBackend]) -> None:
    """Let the addition of gradients with this number fail, from 0."""
    calls, accumulate = count(), backend.accumulate

    def failing(self: TrainerBackend, found: Gradients) -> None:
        if next(calls) == at:
            raise RuntimeError("an addition fails")
        accumulate(self, found)

    monkeypatch.setattr(backend, "accumulate", failing)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_gradients_that_were_added_before_a_pass_failed_are_forgotten(models, monkeypatch, at):
    """Each run has two shares, so its second addition changes the first one's gradients."""
    together, alone = (trainers(models["qwen3"], parallel=2) for _ in range(2))
    with monkeypatch.context() as patched:
        fail_at(at, patched, type(together[0].backend))
        assert forward_backward_together(joined(together, batches(together, round=1))) is None
    assert not any(gradients(run) for run in together)
    assert_as_alone(together, alone, partial(batches, round=1))


def test_a_pass_that_has_changed_held_gradients_fails_for_good(models, monkeypatch):
    """The trainer then ends, and its replacement has the right gradients."""
    runs = trainers(models["qwen3"], parallel=2)
    assert held(runs)
    fail_at(1, monkeypatch, type(runs[0].backend))
    with pytest.raises(RuntimeError, match="an addition fails"):
        forward_backward_together(joined(runs, batches(runs, round=1)))


class Waiting:
    """An engine thread that begins when all jobs are queued."""

    def __init__(self, runs: HostedRuns, monkeypatch: pytest.MonkeyPatch) -> None:
        self._begin = threading.Event()
        self.passes: list[int] = []
        self.done: list[str] = []
        """The run of each computed batch, in order."""
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

    def send(self, run: str, data: Sequence[wire.Datum], **more: Any) -> None:
        message = trainer_pb2.ForwardBackwardRequest(
            header=common_pb2.OperationHeader(run_id=run),
            payload=request(data, **more).SerializeToString(),
        )
        call = BatchCall(message)
        self.engine.read_ahead(call)
        self._calls.append(call)

        def compute(runs: HostedRuns) -> trainer_pb2.ForwardBackwardReply:
            self.done.append(run)
            return call.compute(runs.take_turn(run))

        self._found.append(self.engine.submit(compute, run_id=run, call=call))

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


@pytest.mark.parametrize("parallel", [0, 2])
def test_a_loss_that_fails_leaves_the_held_gradients_of_all_runs(models, monkeypatch, parallel):
    shared, alone = (host(models["qwen3"], *"abc", parallel=parallel) for _ in range(2))
    for runs in (shared, alone):
        for seed, run in enumerate("abc"):
            forward_backward(runs.take_turn(run), data_of(10 + seed, count=12))

    def refuse(*_: object) -> LossResult:
        raise LossInputShape("no loss can be computed")

    refusing = replace(losses.LOSSES["cross_entropy"], name="refusing", compute=refuse)
    monkeypatch.setattr(losses, "_REGISTERED", {**losses.LOSSES, "refusing": refusing})
    waiting = Waiting(shared, monkeypatch)
    for seed, run in enumerate("abc"):
        loss = "refusing" if run == "b" else "cross_entropy"
        waiting.send(run, data_of(seed, count=12), loss=loss)
    found = dict(zip("abc", waiting.replies(), strict=True))
    assert waiting.passes == [3]
    assert found["b"].failure.message == "no loss can be computed"
    for seed, run in ((0, "a"), (2, "c")):
        expected = forward_backward(alone.take_turn(run), data_of(seed, count=12))
        assert parsed(found[run]) == expected
    for run in "abc":
        one, other = (runs.operations_of(run).trainer for runs in (shared, alone))
        assert_same(gradients(one), gradients(other))
    for run in "ac":
        for runs in (shared, alone):
            optim_step(runs.take_turn(run), clip=0.5)
        assert_same_weights(shared.operations_of(run), alone.operations_of(run))


def test_a_batch_joins_the_first_pass_though_another_run_has_ten_waiting(hosts, monkeypatch):
    waiting = Waiting(hosts[0], monkeypatch)
    for seed in range(10):
        waiting.send("a", data_of(seed, count=12))
    for run in "cb":
        waiting.send(run, data_of(20, count=12))
    waiting.replies()
    assert waiting.passes == [3]
    assert "".join(waiting.done) == "acb" + 9 * "a"


def test_a_batch_that_joins_no_pass_is_computed_in_the_order_of_its_arrival(hosts, monkeypatch):
    waiting = Waiting(hosts[0], monkeypatch)
    for seed in range(3):
        waiting.send("a", data_of(seed, count=12))
    waiting.send("b", data_of(20, count=1))
    waiting.send("a", data_of(3, count=12))
    waiting.send("c", data_of(21, count=12))
    waiting.replies()
    assert waiting.passes == [2]
    assert "".join(waiting.done) == "acaaba"


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
