from __future__ import annotations

import pytest

from tandem.v1 import trainer_pb2
from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.local_trainer import load, make
from tests.support.losses.batches import mixed_data
from tests.support.trainer_worker import request
from trainer_service.service.operations import HeldBatches, Operations


def test_metrics_are_combined_as_their_suffixes_say():
    held = HeldBatches()
    first = {"a:sum": 1.0, "b:max": 5.0, "c:min": 5.0, "d:mean": 1.0}
    held.add_batch(first, tokens=1, seconds=0.5, sums={"gap_max:max": 2.0})
    held.add_batch(
        {"a:sum": 2.0, "b:max": 4.0, "c:min": 4.0, "d:mean": 5.0, "e": 7.0},
        tokens=3,
        seconds=1.0,
        sums={"gap_max:max": 3.0, "gap:sum": 1.0},
    )
    assert held.metrics == {"a:sum": 3.0, "b:max": 5.0, "c:min": 4.0, "d:mean": 4.0, "e": 7.0}
    assert held.sums == {"gap_max:max": 3.0, "gap:sum": 1.0}
    assert (held.tokens, held.seconds) == (4, 1.5)


def compute(operations: Operations, *, forward_only: bool = False) -> dict[str, float]:
    payload = request(mixed_data(), forward_only=forward_only).SerializeToString()
    reply = operations.forward_backward(trainer_pb2.ForwardBackwardRequest(payload=payload))
    assert not reply.HasField("failure"), reply.failure
    return dict(wire.ForwardBackwardOutput.FromString(reply.output).metrics)


def step(operations: Operations) -> trainer_pb2.OptimStepReply:
    return operations.optim_step(
        trainer_pb2.OptimStepRequest(
            adamw=trainer_pb2.AdamWParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8)
        )
    )


def with_suffix(reply: trainer_pb2.OptimStepReply) -> dict[str, float]:
    """Return the metrics of the batches, without the numbers of the step."""
    return {name: value for name, value in reply.batch_metrics.items() if ":" in name}


def test_a_step_reports_its_batches_and_not_a_forward_or_those_of_the_step_before(models, tmp_path):
    operations = make(models["qwen3"])
    compute(operations, forward_only=True)
    metrics = [compute(operations), compute(operations)]
    first = step(operations)
    for name in ("loss:sum", "tokens:sum"):
        assert first.batch_metrics[name] == pytest.approx(sum(each[name] for each in metrics))
    assert first.batch_tokens == 2 * metrics[0]["tokens:sum"] and first.batch_seconds > 0
    later = compute(operations)
    second = step(operations)
    assert with_suffix(second) == pytest.approx(later)
    assert second.batch_tokens == later["tokens:sum"]


def test_batches_whose_gradients_were_dropped_are_in_no_step(models, tmp_path):
    operations = make(models["qwen3"])
    state = trainer_pb2.SaveCheckpointRequest(path=str(tmp_path / "a"))
    assert not operations.save_checkpoint(state).HasField("failure")
    compute(operations)
    operations.note_refused("no such loss")
    assert step(operations).failure.type == "gradients_incomplete"
    compute(operations)
    load(operations, tmp_path / "a")
    only = compute(operations)
    assert with_suffix(step(operations)) == pytest.approx(only)


def test_a_forward_that_cannot_be_read_leaves_the_gradients_as_they_are(models):
    operations = make(models["qwen3"])
    compute(operations)
    spoiled = b"\x1a\x01\xff"  # a datum that ends within its first field
    routing = wire.ForwardBackwardRouting(model_id="m", seq_id=2, forward_only=True)
    payload = routing.SerializeToString() + spoiled
    reply = operations.forward_backward(trainer_pb2.ForwardBackwardRequest(payload=payload))
    assert reply.failure.type == "malformed_payload"
    assert not step(operations).HasField("failure")
