from __future__ import annotations

import numpy as np
import pytest
import torch
from tinker import types

from tandem import errors
from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.custom_losses import request_body, traced
from tests.support.sdk import request_of
from tests.support.trainer_worker import datum, dense, request
from trainer_service.batches.loss_inputs import DenseBudget, densify
from trainer_service.batches.validation import Batch, BatchLimits, parse, validate
from trainer_service.losses import LOSSES

LIMITS = BatchLimits(vocabulary=50, max_length=8)


def check(message: wire.ForwardBackwardRequest) -> Batch:
    return validate(parse(message.SerializeToString()), limits=LIMITS)


def policy_datum(tokens=(4, 5, 6), **changes):
    inputs = {"logprobs": [-1.0] * len(tokens), "advantages": [1.0] * len(tokens), **changes}
    return datum(tokens, **{name: value for name, value in inputs.items() if value is not None})


def sparse(dense_values, dtype="<f4") -> wire.Tensor:
    array = np.asarray(dense_values, dtype)
    crow = np.concatenate([[0], np.cumsum((array != 0).sum(1))])
    kind = wire.DTYPE_FLOAT32 if dtype == "<f4" else wire.DTYPE_INT64
    return wire.Tensor(
        sparse_csr=wire.SparseCsr(
            values=array[array != 0].tobytes(),
            crow_indices=crow.astype("<i8").tobytes(),
            col_indices=np.nonzero(array)[1].astype("<i8").tobytes(),
        ),
        dtype=kind,
        shape=array.shape,
    )


def test_a_good_batch_becomes_flat_arrays():
    batch = check(request([policy_datum((4, 5, 6)), policy_datum((7, 8))], "ppo"))
    assert batch.tokens.tolist() == [4, 5, 6, 7, 8]
    assert batch.lengths.tolist() == [3, 2]
    assert batch.targets.tolist() == [5, 6, 3, 8, 3]
    assert batch.inputs["advantages"].tolist() == [1.0] * 5
    assert batch.settings.number("clip_low_threshold") == 0.8
    assert batch.settings.number("clip_high_threshold") == 1.2


def test_chunks_of_a_datum_are_put_together():
    made = datum([4, 5, 6])
    made.model_input[0].encoded_text.tokens = np.asarray([4], "<i4").tobytes()
    made.model_input.add().encoded_text.tokens = np.asarray([5, 6], "<i4").tobytes()
    assert check(request([made])).tokens.tolist() == [4, 5, 6]


def test_absent_weights_are_one():
    batch = check(request([datum([4, 5]), datum([6], weights=[0.5])]))
    assert batch.inputs["weights"].tolist() == [1.0, 1.0, 0.5]


def test_inputs_that_the_loss_does_not_use_are_ignored():
    check(request([policy_datum(mask=[1.0, 1.0, 1.0])], "ppo"))


def test_several_targets_per_token_keep_their_shape():
    made = datum([4, 5], targets=[[1, 2, 3], [4, 5, 6]], weights=[[1, 0, 0], [0.5, 0.5, 0]])
    batch = check(request([made, datum([7])]))
    assert batch.widths.tolist() == [3, 1]
    assert batch.trailing.tolist() == [3, 0]
    assert batch.targets.tolist() == [1, 2, 3, 4, 5, 6, 3]


def test_sparse_targets_and_weights_are_the_dense_ones():
    made = datum([4, 5])
    made.loss_fn_inputs["target_tokens"].CopyFrom(sparse([[7, 0, 9], [0, 8, 0]], "<i8"))
    made.loss_fn_inputs["weights"].CopyFrom(sparse([[0.5, 0, 0.5], [0, 1, 0]]))
    batch = check(request([made]))
    assert batch.targets.tolist() == [7, 0, 9, 0, 8, 0]
    assert batch.inputs["weights"].tolist() == [0.5, 0, 0.5, 0, 1, 0]


def test_sparse_targets_without_weights_are_refused():
    made = datum([4, 5])
    made.loss_fn_inputs["target_tokens"].CopyFrom(sparse([[7, 0], [0, 8]], "<i8"))
    with pytest.raises(errors.LossInputMissing, match=r"datum 0 lacks 'weights'"):
        check(request([made]))


def test_a_sparse_tensor_that_contradicts_itself_is_refused():
    made = datum([4, 5])
    bad = sparse([[7, 0], [0, 8]], "<i8")
    bad.sparse_csr.col_indices = np.asarray([0, 2], "<i8").tobytes()
    made.loss_fn_inputs["target_tokens"].CopyFrom(bad)
    with pytest.raises(errors.LossInputShape, match="do not describe"):
        check(request([made]))


def test_a_sparse_column_given_twice_is_refused():
    made = datum([4, 5])
    bad = sparse([[7, 6], [0, 8]], "<i8")
    bad.sparse_csr.col_indices = np.asarray([1, 1, 1], "<i8").tobytes()
    made.loss_fn_inputs["target_tokens"].CopyFrom(bad)
    with pytest.raises(errors.LossInputShape, match="each once"):
        check(request([made]))


def test_a_sparse_tensor_wider_than_the_vocabulary_is_refused_before_it_costs_memory():
    made = datum([4, 5])
    bad = sparse([[7, 0], [0, 8]], "<i8")
    bad.shape[1] = 10**12
    made.loss_fn_inputs["target_tokens"].CopyFrom(bad)
    with pytest.raises(errors.LossInputShape, match=r"must be \[2, 50\]"):
        check(request([made]))


@pytest.mark.parametrize("columns", [2**25, 2**40, 2**62])
def test_an_input_of_a_custom_loss_that_names_a_vast_shape_is_refused(columns):
    pair = sparse([[1.0, 0.0], [0.0, 1.0]])
    pair.shape[:] = [2, columns]
    room = DenseBudget(cells=2**26 - 1)
    with pytest.raises(errors.LossInputShape, match=r"datum 0, 'pair' has \d+ cells"):
        densify(pair, where="datum 0, 'pair'", expected=(2, columns), budget=room)


def shaped(*shape: int, dtype: int = wire.DTYPE_FLOAT32, csr: bool = False) -> wire.Tensor:
    """An empty tensor. Its shape contains a 0."""
    tensor = wire.Tensor(dtype=dtype, shape=shape)
    if csr:
        tensor.sparse_csr.crow_indices = np.zeros(1, "<i8").tobytes()
    else:
        tensor.dense = b""
    return tensor


def check_pair(pair: wire.Tensor) -> Batch:
    made = datum([4, 5])
    made.loss_fn_inputs["pair"].CopyFrom(pair)
    message = parse(request([made], "custom").SerializeToString())
    handle = traced(lambda logprobs, pair: (logprobs.sum(), {}), logprobs=1, pair=2)
    return validate(message, limits=LIMITS, definition=request_body(handle))


@pytest.mark.parametrize(
    "pair",
    [
        *[
            shaped(*shape, dtype=dtype)
            for shape in ((0, 2**62), (2**62, 0), (0, 2**27))
            for dtype in (wire.DTYPE_FLOAT32, wire.DTYPE_INT64, wire.DTYPE_BFLOAT16)
        ],
        *[shaped(*shape, csr=True) for shape in ((0, 2**62), (2**62, 0))],
    ],
    ids=lambda pair: f"{list(pair.shape)}, {pair.WhichOneof('encoding')}, {pair.dtype}",
)
def test_an_empty_input_of_a_custom_loss_with_a_vast_dimension_is_refused(pair):
    with pytest.raises(errors.LossInputShape, match=r"datum 0, 'pair' has the shape \["):
        check_pair(pair)


@pytest.mark.parametrize("csr", [False, True])
def test_an_input_of_a_custom_loss_may_be_empty(csr):
    [pair] = check_pair(shaped(0, 7, csr=csr)).arrays["pair"]
    assert pair.shape == (0, 7)


def test_sparse_tensors_of_a_request_share_their_room():
    room = DenseBudget(cells=10)
    for _ in range(2):
        densify(sparse([[1.0, 0.0], [0.0, 1.0]]), where="x", expected=(2, 2), budget=room)
    with pytest.raises(errors.LossInputShape, match="may have 10 together"):
        densify(sparse([[1.0, 0.0], [0.0, 1.0]]), where="x", expected=(2, 2), budget=room)


def test_what_the_sdk_makes_of_a_sparse_matrix_is_read_as_the_dense_one():
    targets = torch.zeros(3, 12, dtype=torch.int64)
    weights = torch.zeros(3, 12)
    targets[0, 2], targets[1, 3], targets[2, 11] = 7, 8, 9
    weights[0, 2], weights[1, 3], weights[2, 11] = 0.5, 0.25, 1.0
    made = types.Datum(
        model_input=types.ModelInput.from_ints([4, 5, 6]),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )
    assert made.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    batch = check(request_of([made], "cross_entropy"))
    assert batch.targets.tolist() == targets.flatten().tolist()
    assert batch.inputs["weights"].tolist() == weights.flatten().tolist()
    assert (batch.widths.tolist(), batch.totals.active) == ([12], 3)


def test_bfloat16_inputs_are_read():
    made = datum([4, 5])
    made.loss_fn_inputs["weights"].CopyFrom(
        wire.Tensor(
            dense=np.asarray([0x3F80, 0x4000], "<u2").tobytes(),
            dtype=wire.DTYPE_BFLOAT16,
            shape=[2],
        )
    )
    batch = check(request([made, datum([6], weights=[0.5])]))
    assert batch.inputs["weights"].tolist() == [1.0, 2.0, 0.5]


def test_bytes_that_are_no_message_are_malformed():
    with pytest.raises(errors.MalformedPayload, match="3 bytes"):
        parse(b"\xff\xff\xff")


def with_image():
    made = datum([4, 5])
    made.model_input.add().image.data = b"png"
    return made


def with_type(dtype: int):
    made = datum([4, 5], weights=[1.0, 1.0])
    made.loss_fn_inputs["weights"].dtype = dtype
    return made


def with_cut_bytes():
    made = datum([4, 5], weights=[1.0, 1.0])
    made.loss_fn_inputs["weights"].dense = b"\0" * 7
    return made


def configured(loss: str, **settings: float | str) -> wire.ForwardBackwardRequest:
    """Settings in the newer clients' form, texts among them."""
    message = request([policy_datum()], loss)
    for name, value in settings.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[name].text = value
        else:
            message.loss_fn_config_v2[name].number = value
    return message


BAD = {
    "no datum": (request([]), errors.EmptyBatch, "no datum"),
    "no token": (request([datum([4]), datum([])]), errors.EmptyBatch, "datum 1 has no token"),
    "an image": (request([with_image()]), errors.UnsupportedInput, "datum 0.*image"),
    "a token too large": (
        request([datum([4]), datum([4, 50])]), errors.TokenOutOfVocabulary,
        r"datum 1, position 1: token 50 .*50 tokens \(0 to 49\)"),
    "a negative token": (
        request([datum([-1, 4])]), errors.TokenOutOfVocabulary, "datum 0, position 0: token -1"),
    "a target too large": (
        request([datum([4]), datum([4, 5], targets=[[1, 2], [3, 99]])]),
        errors.TokenOutOfVocabulary, "datum 1, position 1: target token 99"),
    "a long sequence": (
        request([datum([4] * 9)]), errors.SequenceTooLong,
        "datum 0 has 9 tokens; the model takes 8"),
    "no advantages": (
        request([policy_datum(), policy_datum(advantages=None)], "ppo"), errors.LossInputMissing,
        "datum 1 lacks 'advantages'; ppo needs target_tokens, logprobs, advantages"),
    "too few advantages": (
        request([policy_datum(advantages=[1.0, 1.0])], "ppo"), errors.LossInputShape,
        r"'advantages' has the shape \[2\]; .*\[3\]"),
    "too few targets": (
        request([datum([4, 5], targets=[4])]), errors.LossInputShape,
        r"'target_tokens' has the shape \[1\]; the model input has 2 tokens"),
    "two targets per token for ppo": (
        request([datum([4], targets=[[1, 2]], logprobs=[[0, 0]], advantages=[[0, 0]])], "ppo"),
        errors.LossInputShape, "one target per token"),
    "weights of whole numbers": (
        request([with_type(wire.DTYPE_INT64)]), errors.LossInputShape,
        "'weights' must be float32, not int64"),
    "weights of no type": (
        request([with_type(wire.DTYPE_UNSPECIFIED)]), errors.LossInputShape,
        "'weights' must be float32"),
    "bytes cut off": (
        request([with_cut_bytes()]), errors.LossInputShape,
        "7 bytes; 2 values of type float32 are 8"),
    "NaN": (
        request([policy_datum(), policy_datum(advantages=[1, float("nan"), 0])], "ppo"),
        errors.LossInputNotFinite, "datum 1, position 1: 'advantages' is nan"),
    "infinity": (
        request([policy_datum(ref_logprobs=[0, 0, float("-inf")])], "cispo"),
        errors.LossInputNotFinite, "datum 0, position 2: 'ref_logprobs' is -inf"),
    "an unknown loss": (
        request([datum([4])], "pppo"), errors.UnknownLoss,
        f"'pppo'; known: {', '.join(sorted(LOSSES))}"),
    "an unknown setting": (
        request([policy_datum()], "dro", settings={"clip": 0.2}), errors.UnknownLossSetting,
        "no setting 'clip'; its settings: aggregation, beta, kl_coeff, kl_type, max_length"),
    "a setting of another loss": (
        request([datum([4])], settings={"beta": 1.0}), errors.UnknownLossSetting,
        "cross_entropy has no setting 'beta'; its settings: aggregation, max_length"),
    "a setting out of its range": (
        request([policy_datum()], "dro", settings={"beta": -1.0}), errors.UnknownLossSetting,
        "'beta' of dro must be at least 0, not -1"),
    "a setting on the bound that it must be above": (
        request([policy_datum()], "ppo", settings={"tis_cap": 0.0}), errors.UnknownLossSetting,
        "'tis_cap' of ppo must be above 0, not 0"),
    "a number for a text": (
        request([policy_datum()], "ppo", settings={"aggregation": 1.0}),
        errors.UnknownLossSetting, "'aggregation' of ppo must be a text, not the number 1.0"),
    "a text that is no choice": (
        configured("ppo", aggregation="mean"), errors.UnknownLossSetting,
        "must be one of token_sum, token_mean, seq_mean_token_mean, constant, not 'mean'"),
    "an unknown correction": (
        configured("ppo", correction="tis+magic"), errors.UnknownLossSetting,
        "unknown correction 'magic'; known: none, tis, seq_tis, mis, seq_mis, icepop"),
    "a constant without its length": (
        configured("ppo", aggregation="constant"), errors.UnknownLossSetting, "set max_length"),
    "a dual clip below one": (
        configured("ppo", dual_clip=0.5), errors.UnknownLossSetting,
        "above 1, or 0 to turn it off"),
    "a KL term without a reference": (
        configured("ppo", kl_coeff=0.1), errors.LossInputMissing,
        "datum 0 lacks 'ref_logprobs', which ppo needs since kl_coeff is 0.1"),
    "an optional input of some datums": (
        request([policy_datum(mask=[1.0, 1.0, 0.0]), policy_datum()], "ppo"),
        errors.LossInputMissing,
        "datum 1 lacks 'mask', which other datums have: give it to all or to none"),
    "a pair cut in two": (
        request([datum([4], ref_logprobs=[0.0])] * 3, "dpo"), errors.LossInputShape,
        "dpo takes datums in groups of 2, and 3 came"),
    "several numbers where a datum has one": (
        request([datum([4, 5], ref_logprobs=[0, 0], desirable=[1, 1])], "kto"),
        errors.LossInputShape,
        r"'desirable' has the shape \[2\]; it must be one number per datum: \[1\]"),
    "bounds of another length": (
        request([policy_datum(clip_low_threshold=[0.5, 0.5])], "ppo"), errors.LossInputShape,
        r"has the shape \[2\]; it must be that of target_tokens: \[3\] or \[1\]"),
    "custom without a definition": (
        request([datum([4])], "custom"), errors.UnknownLoss,
        "create one with ServiceClient.create_custom_loss"),
    "a setting that is text": (
        configured("ppo", clip_low_threshold="low"), errors.UnknownLossSetting, "finite number"),
    "a setting that is NaN": (
        request([policy_datum()], "ppo", settings={"clip_low_threshold": float("nan")}),
        errors.UnknownLossSetting, "finite number"),
    "bounds the wrong way round": (
        request([policy_datum()], "ppo", settings={"clip_low_threshold": 1.5}),
        errors.UnknownLossSetting, "above"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    message, error, sentence = BAD[name]
    with pytest.raises(error, match=sentence) as caught:
        check(message)
    assert caught.value.category == "user"


@pytest.mark.parametrize(
    ("loss", "setting"),
    [
        (name, setting.name)
        for name, loss in LOSSES.items()
        for setting in loss.settings
        if not isinstance(setting.default, str)
    ],
)
@pytest.mark.parametrize("value", [3.5e38, 1e300, -1e300])
def test_a_number_that_float32_cannot_hold_is_no_setting(loss, setting, value):
    message = request([policy_datum()] * 2, loss, settings={setting: value})
    with pytest.raises(errors.UnknownLossSetting, match=f"'{setting}' of {loss} must "):
        check(message)


def test_a_missing_target_names_what_the_loss_needs():
    made = datum([4, 5])
    del made.loss_fn_inputs["target_tokens"]
    with pytest.raises(errors.LossInputMissing, match="cross_entropy needs target_tokens"):
        check(request([made]))


def test_a_tensor_without_shape_is_taken_as_one_dimension():
    made = datum([4, 5], weights=[1.0, 2.0])
    del made.loss_fn_inputs["weights"].shape[:]
    assert check(request([made])).inputs["weights"].tolist() == [1.0, 2.0]
    assert dense([1.0], "<f4").shape == [1]


def test_settings_may_be_texts_and_the_newer_map_wins():
    message = configured("ppo", aggregation="token_mean", clip_high_threshold=1.3)
    message.loss_fn_config["clip_high_threshold"] = 1.4
    settings = check(message).settings
    assert settings.text("aggregation") == "token_mean"
    assert settings.number("clip_high_threshold") == 1.3


def test_the_older_map_of_settings_is_read_where_it_is_alone():
    message = request([policy_datum()], "ppo", settings={"clip_high_threshold": 1.4})
    assert check(message).settings.number("clip_high_threshold") == 1.4


def test_sampler_logprobs_that_are_not_finite_pass_and_do_not_act():
    batch = check(request([policy_datum(logprobs=[-1.0, float("nan"), float("-inf")])], "ppo"))
    assert batch.totals.active == 1


def test_a_bound_per_datum_holds_for_its_tokens_and_the_setting_for_the_others():
    bounded = policy_datum((4, 5), clip_low_threshold=[0.5])
    by_token = policy_datum((4, 5), clip_low_threshold=[0.6, 0.7])
    batch = check(request([bounded, policy_datum((4, 5)), by_token], "ppo"))
    expected = np.array([0.5, 0.5, 0.8, 0.8, 0.6, 0.7], np.float32)
    assert batch.inputs["clip_low_threshold"].tolist() == expected.tolist()
    assert "clip_high_threshold" not in batch.inputs


def test_the_totals_are_those_of_the_whole_request():
    data = [policy_datum(), policy_datum(advantages=[0.0, 1.0, 0.0]), policy_datum((4,))]
    totals = check(request(data, "ppo")).totals
    assert (totals.datums, totals.entries, totals.active) == (3, 7, 5)
    masked = [policy_datum(mask=[1.0, 0.0, 0.0]) for _ in range(2)]
    assert check(request(masked, "ppo")).totals.active == 2
    assert check(request(masked, "dro")).totals.active == 2
    assert check(request(data, "dro")).totals.active == 7


def add_spans(made: wire.Datum, *, inputs: list[tuple], targets: list[tuple]) -> wire.Datum:
    """Spans (kind, sequence id, length)."""
    both = ((made.model_input_spans, inputs), (made.loss_fn_input_spans, targets))
    for field, spans in both:
        for kind, sequence, length in spans:
            part = getattr(field.add(), kind)
            part.sequence_id, part.length = sequence, length
    return made


def dialogue() -> wire.Datum:
    """Question, answer, remark, answer."""
    return add_spans(
        policy_datum((4, 5, 6, 7, 8)),
        inputs=[("prompt_tokens", "a", 2), ("sampled_tokens", "a", 3)],
        targets=[
            ("prompt_tokens", "a", 1),
            ("sampled_tokens", "a", 2),
            ("prompt_tokens", "b", 1),
            ("sampled_tokens", "b", 1),
        ],
    )


def test_spans_number_the_sampled_sequences():
    batch = check(request([policy_datum((4, 5)), dialogue(), dialogue()], "stable_reinforce"))
    assert batch.sequences is not None
    assert batch.sequences.tolist() == [0, 0, -1, 1, 1, -1, 2, -1, 3, 3, -1, 4]
    assert batch.totals.active == 2 + 3 + 3


def test_without_spans_there_are_no_sequences():
    assert check(request([policy_datum()], "ppo")).sequences is None


def test_spans_of_the_sdk_are_read():
    made = types.Datum(
        model_input=types.ModelInput.from_ints([4, 5, 6]),
        loss_fn_inputs={"target_tokens": [5, 6, 3], "advantages": [0.0, 1.0, 1.0]},
    ).with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id="a", length=2),
            types.SampledProvenanceSpan(sequence_id="a", length=1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id="a", offset=1, length=1),
            types.SampledProvenanceSpan(sequence_id="a", length=2),
        ],
    )
    batch = check(request_of([made], "stable_reinforce", {"kl_coeff": 0.05}))
    assert batch.sequences is not None
    assert batch.sequences.tolist() == [-1, 0, 0]
    assert batch.settings.number("kl_coeff") == 0.05


def test_lists_that_the_sdk_knows_are_read_as_inputs_of_gspo():
    made = types.Datum(
        model_input=types.ModelInput.from_ints([4, 5]),
        loss_fn_inputs={
            "target_tokens": [5, 3],
            "logprobs": [-1.0, -2.0],
            "advantages": [1.0, -1.0],
            "sequence_ratio_mask": [0.0, 1.0],
            "clip_low_threshold": [0.9],
            "clip_high_threshold": [1.1, 1.3],
        },
    )
    config = {"aggregation": "seq_mean_token_mean", "clip_low_threshold": 0.5}
    batch = check(request_of([made], "gspo", config))
    assert batch.inputs["sequence_ratio_mask"].tolist() == [0.0, 1.0]
    expected = np.array([[0.9, 0.9], [1.1, 1.3]], np.float32)
    assert batch.inputs["clip_low_threshold"].tolist() == expected[0].tolist()
    assert batch.inputs["clip_high_threshold"].tolist() == expected[1].tolist()
    assert batch.settings.text("aggregation") == "seq_mean_token_mean"


WHOLE = ("sampled_tokens", "a", 3)
BAD_SPANS = {
    "too short": ([("sampled_tokens", "a", 2)], [WHOLE], "'model_input_spans' cover 2 .* has 3"),
    "too long": ([WHOLE], [WHOLE, WHOLE], "'loss_fn_input_spans' cover 6 positions"),
    "of one list alone": ([WHOLE], [], "'loss_fn_input_spans' cover 0 positions"),
    "without a sequence": ([("prompt_tokens", "", 3)], [WHOLE], "span 0 has no sequence_id"),
    "negative": ([WHOLE], [("prompt_tokens", "a", -1)], "length -1; neither may be negative"),
}


@pytest.mark.parametrize("name", BAD_SPANS)
def test_spans_that_do_not_tile_are_refused(name):
    inputs, targets, sentence = BAD_SPANS[name]
    made = add_spans(policy_datum(), inputs=inputs, targets=targets)
    with pytest.raises(errors.LossInputShape, match=sentence):
        check(request([policy_datum(), made], "ppo"))


def test_a_span_of_no_kind_is_refused():
    made = policy_datum()
    made.model_input_spans.add()
    with pytest.raises(errors.LossInputShape, match="names neither"):
        check(request([made], "ppo"))
