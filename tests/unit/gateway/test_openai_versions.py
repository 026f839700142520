"""The weight versions in answers of the OpenAI-compatible routes."""

from __future__ import annotations

import numpy as np
import pytest

from gateway.api.openai.prompts import prompts_of
from gateway.api.openai.responses import ResponseBuilder
from gateway.api.openai.schemas import ChatCompletionRequest, CompletionRequest
from gateway.api.openai.tokenizer import ModelTokenizer
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2
from tests.support.gateway.speaking_models import CHAT, byte_tokenizer, write_speaking_model

OLD, NEW = "s-1:train:0/v000001-11111111", "s-1:train:0/v000004-22222222"
IDS = np.array(byte_tokenizer().encode("abc").ids, np.int32)


@pytest.fixture
def builder_of(tmp_path):
    folder = write_speaking_model(tmp_path / "speaker", byte_tokenizer())
    tokenizer = ModelTokenizer("speaker", folder)

    def make(request) -> ResponseBuilder:
        return ResponseBuilder(
            request,
            tokenizer=tokenizer,
            prompts=prompts_of(request, tokenizer, max_length=64),
            params=sampler_pb2.SamplingParams(),
            weight_version=OLD,
        )

    return make


REQUESTS = [
    CompletionRequest(model="speaker", prompt="x", return_token_ids=True),
    ChatCompletionRequest(model="speaker", messages=CHAT, return_token_ids=True),
]


def sampled(*runs: tuple[str, int, int], version: str) -> tinker_pb2.SampleResponse:
    versions = [tinker_pb2.TandemVersionRun(version=v, step=s, tokens=n) for v, s, n in runs]
    sequence = tinker_pb2.SampledSequence(
        stop_reason=tinker_pb2.STOP_REASON_LENGTH,
        tokens=IDS.tobytes(),
        logprobs=np.zeros(len(IDS), np.float32).tobytes(),
        tandem_versions=versions,
    )
    return tinker_pb2.SampleResponse(sequences=[sequence], tandem_weight_version=version)


@pytest.mark.parametrize("request_", REQUESTS)
def test_an_in_flight_answer_names_the_versions_of_its_tokens_and_the_last_one(
    builder_of, request_
):
    answer = sampled((OLD, 0, 1), (NEW, 1, 2), version=NEW)
    content = builder_of(request_).response([answer])
    assert content["tandem_weight_version"] == NEW
    assert content["choices"][0]["token_ids"] == IDS.tolist()
    assert content["choices"][0]["tandem_versions"] == [
        {"version": OLD, "step": 0, "tokens": 1},
        {"version": NEW, "step": 1, "tokens": 2},
    ]


@pytest.mark.parametrize("request_", REQUESTS)
def test_an_answer_of_one_version_names_it_once(builder_of, request_):
    content = builder_of(request_).response([sampled(version=OLD)])
    assert content["tandem_weight_version"] == OLD
    assert "tandem_versions" not in content["choices"][0]


@pytest.mark.parametrize("request_", REQUESTS)
def test_each_part_of_a_stream_names_the_version_of_its_tokens(builder_of, request_):
    builder = builder_of(request_)
    deltas = [
        sampler_pb2.SampleDelta(
            tokens=IDS[at : at + 1].tobytes(), logprobs=bytes(4), version=version
        )
        for at, version in enumerate((OLD, NEW, NEW))
    ]
    parts = [part for delta in deltas for part in builder.parts(delta, prompt=0)]
    assert [part["tandem_weight_version"] for part in parts] == [OLD, NEW, NEW]
    assert [part["choices"][0]["token_ids"] for part in parts] == IDS[:, None].tolist()
