from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from sampler_service.engine import EngineFacts, EngineRequest
from sampler_service.service.request_parser import parse_request
from tandem.errors import (
    EmptyBatch,
    InvalidRequest,
    MalformedPayload,
    SequenceTooLong,
    TokenOutOfVocabulary,
)
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2 as wire

FACTS = EngineFacts(
    vocabulary=100,
    max_length=16,
    model_length=16,
    dtype="float32",
    device="cpu",
    name="x",
    end_tokens=(1, 2),
)


def message(prompt=(5, 6, 7), *, num_samples=1, payload=None, topk=0, **params):
    return sampler_pb2.SampleRequest(
        operation_id="op",
        prompt_tokens=np.asarray(prompt, "<i4").tobytes() if payload is None else payload,
        num_samples=num_samples,
        topk_sample_logprobs=topk,
        params=sampler_pb2.SamplingParams(
            **{"max_tokens": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0, **params}
        ),
    )


def asked(request: sampler_pb2.SampleRequest, **fields: object) -> sampler_pb2.SampleRequest:
    request.MergeFrom(sampler_pb2.SampleRequest(**fields))
    return request


def engine_request(message: sampler_pb2.SampleRequest, facts: EngineFacts) -> EngineRequest:
    return parse_request(message, facts).request


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (message(prompt=()), EmptyBatch),
        (message(payload=b"abc"), MalformedPayload),
        (message(prompt=(5, 100)), TokenOutOfVocabulary),
        (message(prompt=(5, -1)), TokenOutOfVocabulary),
        (message(prompt=[5] * 16), SequenceTooLong),
        (message(prompt=[5] * 13), SequenceTooLong),
        (message(num_samples=0), InvalidRequest),
        (message(num_samples=-3), InvalidRequest),
        (message(num_samples=10**6), InvalidRequest),
        (message(max_tokens=-1), InvalidRequest),
        (message(temperature=-0.5), InvalidRequest),
        (message(temperature=math.nan), InvalidRequest),
        (message(temperature=math.inf), InvalidRequest),
        (message(top_p=0.0), InvalidRequest),
        (message(top_p=1.5), InvalidRequest),
        (message(top_p=math.nan), InvalidRequest),
        (message(top_k=-2), InvalidRequest),
        (message(min_p=-0.1), InvalidRequest),
        (message(min_p=1.1), InvalidRequest),
        (message(min_p=math.nan), InvalidRequest),
        (message(presence_penalty=2.1), InvalidRequest),
        (message(frequency_penalty=-2.1), InvalidRequest),
        (message(frequency_penalty=math.nan), InvalidRequest),
        (message(topk=101), InvalidRequest),
        (message(stop_given=True, stop_token_ids=[100]), TokenOutOfVocabulary),
        (message(stop_given=True, stop_strings=[""]), InvalidRequest),
    ],
)
def test_a_mistake_is_a_typed_error_with_a_sentence(request_, error):
    with pytest.raises(error) as raised:
        engine_request(request_, FACTS)
    assert raised.value.category == "user"
    assert len(raised.value.message.split()) > 4


def tensor(ids, *, dtype=wire.DTYPE_INT64, numbers="<i8", shape=None) -> bytes:
    array = np.asarray(ids, numbers)
    return wire.Tensor(
        dense=array.tobytes(), dtype=dtype, shape=array.shape if shape is None else shape
    ).SerializeToString()


def csr(values, crow, columns, shape=(2, 3)) -> bytes:
    parts = [np.asarray(part, "<i8").tobytes() for part in (values, crow, columns)]
    return wire.Tensor(
        sparse_csr=wire.SparseCsr(values=parts[0], crow_indices=parts[1], col_indices=parts[2]),
        dtype=wire.DTYPE_INT64,
        shape=shape,
    ).SerializeToString()


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (b"\xff\xff\xff", MalformedPayload),
        (tensor([[5], [6], [7]]), InvalidRequest),  # the first token has no row
        (tensor([5, 6]), InvalidRequest),
        (tensor([[], []]), InvalidRequest),
        (tensor([[5.0], [6.0]], dtype=wire.DTYPE_FLOAT32, numbers="<f4"), InvalidRequest),
        (tensor([[-1], [-1]]), InvalidRequest),
        (tensor([[100], [5]]), TokenOutOfVocabulary),
        (tensor([[-2], [5]]), TokenOutOfVocabulary),
        (tensor([[5]], shape=(2, 1)), MalformedPayload),
        (csr([5], [0, 1], [0]), MalformedPayload),
        (csr([5], [0, 1, 2], [0]), MalformedPayload),
        (csr([5], [1, 1, 1], [0]), MalformedPayload),
        (csr([5], [0, 1, 1], [3]), MalformedPayload),
        (csr([5], [0, 2, 1], [0]), MalformedPayload),
        (csr([], [0, 0, 0], []), InvalidRequest),
        (csr([5], [0, 1, 1], [0], shape=(2, 2**40)), None),
    ],
)
def test_targets_that_make_no_sense_are_refused(payload, error):
    request = asked(message(), target_prompt_tokens=payload)
    if error is None:
        assert engine_request(request, FACTS).scoring.target_ids.tolist() == [5]
        return
    with pytest.raises(error) as raised:
        engine_request(request, FACTS)
    assert "target_prompt_logprobs" in raised.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"topk_prompt_logprobs": 101},
        {"prompt_alt_tokens_k": 1001},
        {"prompt_alt_tokens_k": -1},
        {"prompt_logprobs_last_n": 1},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 0},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 3},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": -1},
    ],
)
def test_numbers_about_the_prompt_out_of_their_range_are_refused(fields):
    with pytest.raises(InvalidRequest) as raised:
        engine_request(asked(message(), **fields), FACTS)
    assert next(reversed(fields)) in raised.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"topk_prompt_logprobs": 1000},
        {"prompt_alt_tokens_k": 1000},
        {"target_prompt_tokens": tensor(np.arange(4200 * 1000).reshape(4200, 1000) % 2000)},
        {"num_samples": 4200, "topk_sample_logprobs": 1000},
    ],
)
def test_an_answer_with_too_many_logprobs_is_refused_before_it_is_computed(fields):
    facts = replace(FACTS, vocabulary=5000, max_length=10000)
    request = asked(message(prompt=[5] * 4201, max_tokens=1), **fields)
    with pytest.raises(InvalidRequest, match="at most 4194304"):
        engine_request(request, facts)


def test_an_answer_with_too_many_tokens_is_refused_before_it_is_computed():
    facts = replace(FACTS, max_length=10000)
    with pytest.raises(InvalidRequest, match="more than 16777216 tokens"):
        engine_request(message(num_samples=16000, max_tokens=9000), facts)


def test_nothing_is_scored_when_nothing_is_asked():
    assert engine_request(message(), FACTS).scoring is None


def test_without_max_tokens_as_many_as_fit_are_sampled():
    request = message()
    request.params.ClearField("max_tokens")
    assert engine_request(request, FACTS).max_tokens == 13


def test_a_prompt_that_just_fits_is_taken():
    assert len(engine_request(message(prompt=[5] * 12), FACTS).prompt) == 12


def test_no_stop_means_the_end_tokens_and_an_empty_list_means_none():
    assert engine_request(message(), FACTS).stop_token_ids == (1, 2)
    assert engine_request(message(stop_given=True), FACTS).stop_token_ids == ()
    given = engine_request(message(stop_given=True, stop_token_ids=[9]), FACTS)
    assert given.stop_token_ids == (9,)
    strings = engine_request(message(stop_given=True, stop_strings=["ab"]), FACTS)
    assert (strings.stop_strings, strings.stop_token_ids) == (("ab",), ())


def test_a_seed_of_zero_is_a_seed_and_no_seed_is_none():
    assert engine_request(message(seed=0), FACTS).seed == 0
    assert engine_request(message(), FACTS).seed is None


@pytest.mark.parametrize("request_", [message(prompt=[5] * 16), message(prompt=[5] * 13)])
def test_a_refusal_says_whether_the_model_or_its_sampler_is_too_short(request_):
    with pytest.raises(SequenceTooLong, match=r"1[36] prompt tokens \+ 4 max_tokens > 16\.$"):
        parse_request(request_, FACTS)
    with pytest.raises(SequenceTooLong, match=r"> 16\. The model's own length is 64"):
        parse_request(request_, replace(FACTS, model_length=64))


@pytest.mark.parametrize("max_tokens", [None, 0, 1])
@pytest.mark.parametrize(
    "scores",
    [
        {"prompt_logprobs": True},
        {"topk_prompt_logprobs": 2},
        {"prompt_alt_tokens_k": 2},
        {"target_prompt_tokens": tensor([[7]] * 15)},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 1},
    ],
)
def test_a_prompt_that_fills_the_context_is_scored_without_a_sample(max_tokens, scores):
    request = asked(message(prompt=[5] * 16), **scores)
    request.params.ClearField("max_tokens")
    if max_tokens is not None:
        request.params.max_tokens = max_tokens
    parsed = engine_request(request, FACTS)
    assert (parsed.max_tokens, len(parsed.prompt), len(parsed.computed_prompt)) == (0, 16, 15)
    assert parsed.scoring is not None


@pytest.mark.parametrize("max_tokens", [None, 1, 2])
def test_a_prompt_that_fills_the_context_leaves_no_room_for_a_wanted_token(max_tokens):
    request = message(prompt=[5] * 16)
    request.params.ClearField("max_tokens")
    if max_tokens is not None:
        request.params.max_tokens = max_tokens
    if max_tokens == 2:  # the SDK asks for fewer if it wants none
        request.prompt_logprobs = True
    with pytest.raises(SequenceTooLong, match=f"16 prompt tokens \\+ {max_tokens or 1} max_tokens"):
        parse_request(request, FACTS)


def test_a_longer_prompt_than_the_context_is_not_scored():
    request = asked(message(prompt=[5] * 17, max_tokens=0), prompt_logprobs=True)
    with pytest.raises(SequenceTooLong, match=r"17 prompt tokens \+ 0 max_tokens > 16"):
        parse_request(request, FACTS)


def test_a_tiny_temperature_counts_as_the_smallest_that_can_be_computed():
    for temperature in (1e-8, 0.001, 0.009):
        assert engine_request(message(temperature=temperature), FACTS).temperature == 0.01
    assert engine_request(message(temperature=0.0), FACTS).temperature == 0
    assert engine_request(message(temperature=0.02), FACTS).temperature == 0.02
    draws = asked(message(temperature=0.001), prompt_alt_tokens_k=1)
    assert engine_request(draws, FACTS).scoring.draw_temperature == 0.01
