"""Every bad batch is refused as a whole, with a sentence that says what was wrong."""

from __future__ import annotations

import numpy as np
import pytest

from tandem import errors
from tandem.wire.v1 import tinker_pb2 as wire
from tests.workers import datum, dense, request
from trainer_service.batch import Batch, parse
from trainer_service.losses import LOSSES
from trainer_service.validate import Limits, validate

LIMITS = Limits(vocabulary=50, max_length=8)


def check(message: wire.ForwardBackwardRequest) -> Batch:
    return validate(parse(message.SerializeToString()), losses=LOSSES, limits=LIMITS)


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
    assert batch.settings.as_dict() == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


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


def text_setting():
    message = request([policy_datum()], "ppo")
    message.loss_fn_config_v2["clip_low_threshold"].text = "low"
    return message


BAD = {
    "no datum": (request([]), errors.EmptyBatch, "no datum"),
    "no token": (request([datum([4]), datum([])]), errors.EmptyBatch, "datum 1 has no token"),
    "an image": (request([with_image()]), errors.UnsupportedInput, "datum 0.*image"),
    "a token too large": (
        request([datum([4]), datum([4, 50])]),
        errors.TokenOutOfVocabulary,
        r"datum 1, position 1: token 50 .*50 tokens \(0 to 49\)",
    ),
    "a negative token": (
        request([datum([-1, 4])]),
        errors.TokenOutOfVocabulary,
        "datum 0, position 0: token -1",
    ),
    "a target too large": (
        request([datum([4]), datum([4, 5], targets=[[1, 2], [3, 99]])]),
        errors.TokenOutOfVocabulary,
        "datum 1, position 1: target token 99",
    ),
    "a long sequence": (
        request([datum([4] * 9)]),
        errors.SequenceTooLong,
        "datum 0 has 9 tokens; the model takes 8",
    ),
    "no advantages": (
        request([policy_datum(), policy_datum(advantages=None)], "ppo"),
        errors.LossInputMissing,
        "datum 1 lacks 'advantages'; ppo needs target_tokens, logprobs, advantages",
    ),
    "too few advantages": (
        request([policy_datum(advantages=[1.0, 1.0])], "ppo"),
        errors.LossInputShape,
        r"'advantages' has the shape \[2\]; .*\[3\]",
    ),
    "too few targets": (
        request([datum([4, 5], targets=[4])]),
        errors.LossInputShape,
        r"'target_tokens' has the shape \[1\]; the model input has 2 tokens",
    ),
    "two targets per token for ppo": (
        request([datum([4], targets=[[1, 2]], logprobs=[[0, 0]], advantages=[[0, 0]])], "ppo"),
        errors.LossInputShape,
        "one target per token",
    ),
    "weights of whole numbers": (
        request([with_type(wire.DTYPE_INT64)]),
        errors.LossInputShape,
        "'weights' must be float32, not int64",
    ),
    "weights of no type": (
        request([with_type(wire.DTYPE_UNSPECIFIED)]),
        errors.LossInputShape,
        "'weights' must be float32",
    ),
    "bytes cut off": (
        request([with_cut_bytes()]),
        errors.LossInputShape,
        "7 bytes; 2 values of type float32 are 8",
    ),
    "NaN": (
        request([policy_datum(), policy_datum(advantages=[1, float("nan"), 0])], "ppo"),
        errors.LossInputNotFinite,
        "datum 1, position 1: 'advantages' is nan",
    ),
    "infinity": (
        request([policy_datum(logprobs=[0, 0, float("-inf")])], "cispo"),
        errors.LossInputNotFinite,
        "datum 0, position 2: 'logprobs' is -inf",
    ),
    "an unknown loss": (
        request([datum([4])], "pppo"),
        errors.UnknownLoss,
        "'pppo'; known: cispo, cross_entropy, importance_sampling, ppo",
    ),
    "an unknown setting": (
        request([policy_datum()], "ppo", settings={"clip": 0.2}),
        errors.UnknownLossSetting,
        "no setting 'clip'; its settings: clip_high_threshold, clip_low_threshold",
    ),
    "a setting of a loss without any": (
        request([datum([4])], settings={"beta": 1.0}),
        errors.UnknownLossSetting,
        "its settings: none",
    ),
    "a setting that is text": (text_setting(), errors.UnknownLossSetting, "finite number"),
    "a setting that is NaN": (
        request([policy_datum()], "ppo", settings={"clip_low_threshold": float("nan")}),
        errors.UnknownLossSetting,
        "finite number",
    ),
    "bounds the wrong way round": (
        request([policy_datum()], "ppo", settings={"clip_low_threshold": 1.5}),
        errors.UnknownLossSetting,
        "above",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    message, error, sentence = BAD[name]
    with pytest.raises(error, match=sentence) as caught:
        check(message)
    assert caught.value.category == "user"


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
