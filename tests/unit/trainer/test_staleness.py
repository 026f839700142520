"""Datums of old weights are left out of a batch, or refuse it."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

from tandem import errors
from tandem.v1 import trainer_pb2
from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.custom_losses import request_body, traced
from tests.support.local_trainer import (
    assert_same,
    gradients,
    make,
    make_rank,
    optim_step,
    step,
    weights,
)
from tests.support.losses.batches import REQUESTS, mixed_data, mixed_request
from tests.support.tiny_model import VOCABULARY
from tests.support.trainer_worker import datum, dense, logprobs_of, request
from trainer_service.batches.staleness import without_stale
from trainer_service.batches.validation import BatchLimits, parse, validate
from trainer_service.losses import LOSSES
from trainer_service.service.operations import Operations

LIMITS = BatchLimits(vocabulary=VOCABULARY, max_length=64)
STEP, BOUND = 7, 2
AGES = [0, 1, 2, 3, 4, 5]


def aged(data: list[wire.Datum], ages: list[int]) -> list[wire.Datum]:
    """Datums that weights of these ages sampled, for a trainer at `STEP`."""
    made = copy.deepcopy(data)
    for each, age in zip(made, ages, strict=True):
        each.loss_fn_inputs["weight_step"].CopyFrom(dense([STEP - age], "<i8"))
    return made


def with_bound(message: wire.ForwardBackwardRequest, **settings: float):
    for name, value in ({"max_staleness": BOUND} | settings).items():
        message.loss_fn_config_v2[name].number = value
    return message


def kept_of(message: wire.ForwardBackwardRequest, *, step: int = STEP) -> list[bool]:
    batch = validate(parse(message.SerializeToString()), limits=LIMITS)
    return without_stale(batch, step=step).kept.tolist()


@pytest.fixture(scope="module")
def operations(models) -> Operations:
    made = Operations(make_rank(models["qwen3"], micro_batch_tokens=40))
    made.trainer.step = STEP
    return made


def send(operations: Operations, message: wire.ForwardBackwardRequest):
    payload = message.SerializeToString()
    return operations.forward_backward(trainer_pb2.ForwardBackwardRequest(payload=payload))


def computed(operations: Operations, message: wire.ForwardBackwardRequest):
    """The reply, the output, and the gradients, which are dropped afterwards."""
    reply = send(operations, message)
    assert not reply.HasField("failure"), reply.failure
    found = gradients(operations.trainer)
    operations._drop_gradients()
    return reply, wire.ForwardBackwardOutput.FromString(reply.output), found


# --- Which datums ---------------------------------------------------------------------------


def test_of_the_ages_0_to_5_exactly_3_to_5_exceed_the_bound_2():
    data = aged([datum([4, 5, 6], weights=[1.0] * 3) for _ in AGES], AGES)
    assert kept_of(with_bound(request(data))) == [True, True, True, False, False, False]
    assert kept_of(with_bound(request(data), refuse_stale=0)).count(False) == 3


@pytest.mark.parametrize(("bound", "kept"), [(0, 1), (1, 2), (4, 5), (5, 6), (2.5, 3)])
def test_a_datum_as_old_as_the_bound_is_trained(bound, kept):
    data = aged([datum([4, 5]) for _ in AGES], AGES)
    found = kept_of(with_bound(request(data), max_staleness=bound))
    assert found == [age < kept for age in AGES]


def test_the_oldest_token_counts_and_tokens_that_nothing_sampled_do_not():
    rows = [[-1, 5, 7], [-1, 4, 7], [7, 7, 4], [-1, -1, -1], [9, 8, 7]]
    data = [datum([4, 5, 6]) for _ in rows]
    for each, row in zip(data, rows, strict=True):
        each.loss_fn_inputs["weight_step"].CopyFrom(dense(row, "<i8"))
    assert kept_of(with_bound(request(data))) == [True, False, False, True, True]


def test_a_stale_datum_takes_its_pair_along():
    data = aged(mixed_data(6), [0, 3, 1, 2, 5, 5])
    assert kept_of(with_bound(request(data, "dpo"))) == [False, False, True, True, False, False]


def test_without_the_setting_no_age_counts_and_the_input_is_ignored():
    old = datum([4, 5])
    old.loss_fn_inputs["weight_step"].CopyFrom(dense([[1.0]], "<f4"))
    assert kept_of(request([old])) == [True]
    message = request(aged([datum([4, 5])], [7]))
    message.loss_fn_config_v2["refuse_stale"].number = 1
    assert kept_of(message) == [True]


@pytest.mark.parametrize(
    ("tensor", "error", "sentence"),
    [
        (None, errors.LossInputMissing, "datum 1 lacks 'weight_step', which max_staleness needs"),
        (dense([1.0], "<f4"), errors.LossInputShape, "must be int64, not float32"),
        (dense([1, 2], "<i8"), errors.LossInputShape, r"shape \[2\]; it must be \[1\], or \[3\]"),
        (dense([[1]], "<i8"), errors.LossInputShape, r"shape \[1, 1\]"),
        (dense([], "<i8"), errors.LossInputShape, r"shape \[0\]"),
    ],
)
def test_a_wrong_step_is_refused_with_its_datum(tensor, error, sentence):
    data = aged([datum([4, 5, 6]), datum([4, 5, 6])], [0, 0])
    del data[1].loss_fn_inputs["weight_step"]
    if tensor is not None:
        data[1].loss_fn_inputs["weight_step"].CopyFrom(tensor)
    with pytest.raises(error, match=sentence):
        kept_of(with_bound(request(data)))


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_bound_is_a_number_from_0(value):
    with pytest.raises(errors.UnknownLossSetting, match="max_staleness"):
        kept_of(with_bound(request([datum([4, 5])]), max_staleness=value))


# --- What is computed -----------------------------------------------------------------------


@pytest.mark.parametrize("name", REQUESTS)
def test_a_batch_computes_the_bits_of_one_without_its_stale_datums(operations, name):
    data = list(mixed_request(name).data)
    ages = AGES * (len(data) // len(AGES))
    message = mixed_request(name, aged(data, ages))
    kept = kept_of(with_bound(message))
    wanted = mixed_request(name, [each for each, keep in zip(data, kept, strict=True) if keep])
    _, small, wanted_gradients = computed(operations, wanted)
    reply, output, found_gradients = computed(operations, message)
    dropped = kept.count(False)
    assert dropped == (8 if LOSSES[message.loss_fn].group == 2 else 6)
    assert reply.dropped_stale == dropped
    assert output.metrics == {**small.metrics, "dropped_stale:sum": float(dropped)}
    assert_same(found_gradients, wanted_gradients)
    rows = logprobs_of(output)
    assert [len(row) for row in rows] == [
        len(each.model_input[0].encoded_text.tokens) // 4 for each in data
    ]
    for row, keep in zip(rows, kept, strict=True):
        assert np.isnan(row).all() != keep and np.isnan(row).any() != keep
    for row, same in zip(
        (r for r, keep in zip(rows, kept, strict=True) if keep), logprobs_of(small), strict=True
    ):
        assert row.tobytes() == same.tobytes()


def test_the_inputs_of_a_custom_loss_go_with_their_datums():
    data = aged([datum([4, 5], extra=[float(number)]) for number in range(6)], [3, 0, 3, 1, 2, 3])
    handle = traced(lambda logprobs, extra: (logprobs.sum() * extra[0], {}), logprobs=1, extra=1)
    message = parse(with_bound(request(data, "custom")).SerializeToString())
    batch = validate(message, limits=LIMITS, definition=request_body(handle))
    fresh = without_stale(batch, step=STEP).batch
    assert [value.tolist() for value in fresh.arrays["extra"]] == [[1.0], [3.0], [4.0]]
    assert (fresh.totals.datums, fresh.totals.entries) == (3, 6)


def test_a_batch_without_a_stale_datum_says_so(operations):
    data = mixed_data(6)
    _, small, wanted = computed(operations, request(data))
    reply, output, found = computed(operations, with_bound(request(aged(data, [2] * 6))))
    assert output.metrics == {**small.metrics, "dropped_stale:sum": 0.0}
    assert reply.dropped_stale == 0
    assert_same(found, wanted)


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_of_stale_datums_alone_has_no_gradient_and_finite_metrics(operations, name):
    data = aged(mixed_data(6), [3] * 6)
    reply, output, found = computed(operations, with_bound(request(data, name)))
    assert reply.dropped_stale == 6 and reply.tokens == 0
    assert output.metrics["loss:sum"] == output.metrics["tokens:sum"] == 0.0
    assert all(math.isfinite(value) for value in output.metrics.values()), output.metrics
    assert not any(gradient.any() for gradient in found.values())
    assert all(np.isnan(row).all() for row in logprobs_of(output))


def test_a_step_counts_only_trained_datums_and_may_have_none(models):
    operations = make(models["qwen3"])
    data = mixed_data(6)
    operations.trainer.step = STEP
    send(operations, with_bound(request(aged(data, AGES))))
    counted = optim_step(operations)
    lengths = [len(each.model_input[0].encoded_text.tokens) // 4 for each in data]
    assert counted.batch_tokens == sum(lengths[:3])
    assert counted.batch_metrics["dropped_stale:sum"] == 3.0
    before = weights(operations)
    send(operations, with_bound(request(aged(data, [5] * 6))))
    assert step(operations, lr=0.0, decay=0.0)["grad_norm"] == 0.0
    assert_same(weights(operations), before)


def test_a_batch_that_was_read_ahead_is_checked_at_its_turn(operations):
    """A step between the reading and the turn makes a datum older."""
    message = with_bound(request(aged(mixed_data(2), [2, 1])))
    sent = trainer_pb2.ForwardBackwardRequest(payload=message.SerializeToString())
    read = operations.read_batch(sent)
    operations.trainer.step = STEP + 1
    try:
        reply = operations.forward_backward(sent, read=lambda: read)
    finally:
        operations.trainer.step = STEP
    operations._drop_gradients()
    assert reply.dropped_stale == 1


# --- Refusals -------------------------------------------------------------------------------


def test_a_refused_batch_names_the_age_and_its_step_is_not_made(models):
    operations = make(models["qwen3"])
    operations.trainer.step = STEP
    message = with_bound(request(aged(mixed_data(6), AGES)), refuse_stale=1)
    reply = send(operations, message)
    assert reply.failure.type == "stale_version" and reply.dropped_stale == 0
    assert "datum 3 was sampled 3 steps before the trainer's step 7" in reply.failure.message
    assert "max_staleness is 2" in reply.failure.message
    assert optim_step(operations).failure.type == "gradients_incomplete"
    fresh = with_bound(request(aged(mixed_data(6), [0, 1, 2, 2, 1, 0])), refuse_stale=1)
    assert not send(operations, fresh).HasField("failure")
    assert not optim_step(operations).HasField("failure")


def test_a_forward_pass_is_bounded_like_a_batch(operations):
    message = with_bound(request(aged(mixed_data(6), AGES), forward_only=True))
    assert send(operations, message).dropped_stale == 3
