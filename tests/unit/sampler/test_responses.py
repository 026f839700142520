from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from sampler_service.engine import (
    EngineDelta,
    EngineRequest,
    EngineResult,
    PromptScores,
    SampledTokens,
    TopK,
)
from sampler_service.service.request_parser import ParsedRequest
from sampler_service.service.responses import StreamBuffer, encode_response
from sampler_service.weights.loader import LoadableVersion
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2 as wire

ONE, TWO = (LoadableVersion(name=f"run/v{number}", path=Path()) for number in (1, 2))


def parsed(*, prompt_logprobs: bool) -> ParsedRequest:
    request = EngineRequest(id="op", prompt=[5], num_samples=1, max_tokens=1)
    return ParsedRequest(request=request, prompt_logprobs=prompt_logprobs, targets=None)


def test_an_answer_is_encoded_as_the_client_reads_it():
    topk = TopK(np.array([[3, 0]], np.int32), np.array([[-0.5, -99999.0]], np.float32))
    result = EngineResult(
        id="op",
        samples=(
            SampledTokens(
                np.array([7, 1], np.int32), np.array([-1.5, -0.25], np.float32), stopped=True
            ),
            SampledTokens(
                np.array([8], np.int32), np.array([-2.0], np.float32), stopped=False, topk=topk
            ),
        ),
        prompt=PromptScores(logprobs=np.array([np.nan, -3.0], np.float32)),
        cached_tokens=32,
    )
    answer = wire.SampleResponse.FromString(
        encode_response(result, version="run/v1", parsed=parsed(prompt_logprobs=True))
    )
    first, second = answer.sequences
    assert first.tokens == b"\x07\0\0\0\x01\0\0\0"
    assert np.frombuffer(first.logprobs, "<f4").tolist() == [-1.5, -0.25]
    assert (first.stop_reason, second.stop_reason) == (wire.STOP_REASON_STOP, 1)
    assert not first.HasField("topk_sampled_logprobs")
    assert (second.topk_sampled_logprobs.k, second.topk_sampled_logprobs.length) == (2, 1)
    assert np.isnan(np.frombuffer(answer.prompt_logprobs, "<f4")).tolist() == [True, False]
    assert answer.prompt_cache_hit_tokens == 32
    assert answer.tandem_weight_version == "run/v1"


def test_prompt_logprobs_are_sent_only_when_asked_for():
    result = EngineResult(
        id="op", samples=(), prompt=PromptScores(logprobs=np.zeros(2, np.float32))
    )
    answer = wire.SampleResponse.FromString(
        encode_response(result, version="v", parsed=parsed(prompt_logprobs=False))
    )
    assert not answer.HasField("prompt_logprobs")


def delta(index: int, tokens: list[int], *, finished: bool = False) -> EngineDelta:
    count = len(tokens)
    new = SampledTokens(
        tokens=np.array(tokens, np.int32),
        logprobs=-np.array(tokens, np.float32),
        stopped=finished,
        topk=TopK(np.ones((count, 2), np.int32), np.zeros((count, 2), np.float32)),
    )
    return EngineDelta(id="op", index=index, new=new, finished=finished)


def held(delta: sampler_pb2.SampleDelta) -> int:
    topk = delta.topk
    return sum(map(len, (delta.tokens, delta.logprobs, topk.token_ids, topk.logprobs)))


def test_untaken_deltas_are_merged_by_sample_and_wake_the_reader_once():
    async def scenario() -> None:
        woken = []
        loop = asyncio.get_running_loop()

        class Counting:
            def is_closed(self) -> bool:
                return False

            def call_soon_threadsafe(self, call: Any) -> None:
                woken.append(call)
                loop.call_soon(call)

        buffer = StreamBuffer(topk=2, loop=Counting())  # type: ignore[arg-type]
        for step in range(1000):
            buffer.add_deltas([delta(0, [step]), delta(1, [step])], ONE)
        buffer.add_deltas([delta(1, [7], finished=True)], ONE)
        assert len(woken) == 1
        first, second = await buffer.next_deltas()
        assert held(first) + held(second) == 2001 * (8 + 16), "as many bytes as the tokens have"
        assert np.frombuffer(first.tokens, "<i4").tolist() == list(range(1000))
        assert np.frombuffer(first.logprobs, "<f4").tolist() == [-float(i) for i in range(1000)]
        assert (first.topk.length, first.topk.k, first.finished) == (1000, 2, False)
        assert (second.index, second.finished, len(second.tokens)) == (1, True, 4004)
        buffer.add_deltas([delta(0, [3])], ONE)
        buffer.close()
        assert [len(each.tokens) for each in await buffer.next_deltas()] == [4]
        assert await buffer.next_deltas() == []

    asyncio.run(scenario())


def test_a_greedy_sample_is_streamed_for_each_of_its_copies():
    async def scenario() -> None:
        buffer = StreamBuffer(topk=2, copies=3)
        buffer.add_deltas([delta(0, [5], finished=True)], ONE)
        deltas = await buffer.next_deltas()
        assert [(each.index, each.finished) for each in deltas] == [(0, True), (1, True), (2, True)]

    asyncio.run(scenario())


def test_tokens_of_two_versions_are_not_merged_into_one_delta():
    async def scenario() -> None:
        buffer = StreamBuffer(topk=2)
        for tokens, version in (([5], ONE), ([6], ONE), ([7], TWO)):
            buffer.add_deltas([delta(0, tokens)], version)
        told = [(each.version, len(each.tokens) // 4) for each in await buffer.next_deltas()]
        assert told == [(ONE.name, 2), (TWO.name, 1)]

    asyncio.run(scenario())
