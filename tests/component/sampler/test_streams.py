"""Streamed samples of a real engine equal unstreamed ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.adapter_files import write_adapter_files, write_merged
from tests.support.sampler_streams import gather, narrow_stream, open_stream, stream
from tests.support.sampler_worker import PROMPT, SamplerClient, publish, publish_adapter, same, text
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    "arguments",
    [
        {"seed": 1, "max_tokens": 40},
        {"seed": 2, "n": 5, "max_tokens": 30, "stop": []},
        {"seed": 3, "n": 3, "topk": 4, "top_k": 3, "temperature": 0.7, "max_tokens": 12},
        {"seed": 4, "n": 2, "prompt_logprobs": True, "max_tokens": 9, "stop": [20, 21, 22, 23]},
        {"temperature": 0.0, "n": 3, "max_tokens": 9, "topk": 2},
        {"seed": 5, "max_tokens": 1},
    ],
)
def test_a_stream_adds_up_to_the_unstreamed_answer(
    sampler: SamplerClient, arguments: dict[str, Any]
):
    streamed = stream(sampler, PROMPT, **arguments)
    assert streamed.adds_up()
    assert same(streamed.answer, sampler.sample(PROMPT, **arguments))
    assert streamed.reply.sampled_tokens == sum(len(t.tokens) for t in streamed.samples.values())


def test_tokens_arrive_before_the_answer(sampler: SamplerClient):
    call = open_stream(sampler, sampler.request(PROMPT, n=20, max_tokens=500, stop=[]))
    first = next(call)
    assert sampler.describe().running == 1
    rest = gather([first, *call])
    assert rest.adds_up()
    assert rest.samples[0].deltas > 1


def test_the_tokens_of_a_stop_string_are_streamed(sampler: SamplerClient):
    plain = sampler.sample(PROMPT, seed=5, max_tokens=60, stop=[]).samples[0].tokens
    at = next(i for i in range(5, 58) if min(plain[i : i + 2]) > 2)
    stop = text(plain[at : at + 2])
    streamed = stream(sampler, PROMPT, seed=5, max_tokens=60, stop=[stop])
    assert streamed.adds_up()
    assert streamed.samples[0].stopped
    assert text(streamed.samples[0].tokens[-2:]) == stop
    assert same(streamed.answer, sampler.sample(PROMPT, seed=5, max_tokens=60, stop=[stop]))


def test_streams_of_several_versions_wait_their_turn_and_come_from_their_own(
    sampler: SamplerClient, changed: Path, directory: Path
):
    new = publish(changed, directory, number=71)
    calls = [
        open_stream(sampler, sampler.request(PROMPT, version=v, seed=6, n=2, max_tokens=20))
        for v in (sampler.base, new, sampler.base)
    ]
    streamed = [gather(call) for call in calls]
    assert all(each.adds_up() for each in streamed)
    assert [each.answer.version for each in streamed] == ["base/tiny", new.name, "base/tiny"]
    assert same(streamed[0].answer, streamed[2].answer)
    assert same(streamed[1].answer, sampler.sample(PROMPT, version=new, seed=6, n=2, max_tokens=20))


def test_adapters_are_streamed_beside_the_base_model(
    tied_adapters: SamplerClient, model: Path, directory: Path
):
    files = write_adapter_files(directory / "streamed adapter", model, seed=9)
    merged = write_merged(directory / "streamed merged", model, files)
    adapter = publish_adapter(files, directory, number=72, merged=merged)
    versions = (adapter, tied_adapters.base)
    arguments: dict[str, Any] = {"seed": 7, "max_tokens": 30, "stop": []}
    calls = [
        open_stream(tied_adapters, tied_adapters.request(PROMPT, version=v, **arguments))
        for v in versions
    ]
    for version, call in zip(versions, calls, strict=True):
        streamed = gather(call)
        assert streamed.adds_up()
        assert same(streamed.answer, tied_adapters.sample(PROMPT, version=version, **arguments))


def test_a_mistake_ends_a_stream_with_a_failure(sampler: SamplerClient):
    (event,) = open_stream(sampler, sampler.request([]))
    assert event.reply.failure.type == "empty_batch"


def test_a_cancelled_stream_frees_the_engine(sampler: SamplerClient):
    call = open_stream(sampler, sampler.request(PROMPT, n=500, max_tokens=500, stop=[]))
    next(call)
    call.cancel()
    sampler.sample(PROMPT, max_tokens=1)
    wait_until(lambda: not sampler.describe().running)
    assert sampler.describe().waiting == 0
    with pytest.raises(grpc.RpcError):
        list(call)


def test_a_reader_that_stops_reading_does_not_delay_the_engine(sampler: SamplerClient):
    arguments: dict[str, Any] = {"n": 40, "max_tokens": 500, "stop": [], "seed": 8, "topk": 20}
    with narrow_stream(sampler, sampler.request(PROMPT, **arguments)) as call:
        first = next(call)
        while sampler.describe().running:  # to its end, without a reader
            sampler.sample(PROMPT, max_tokens=1)
        streamed = gather([first, *call])
    assert streamed.adds_up()
    deltas = sum(each.deltas for each in streamed.samples.values())
    assert deltas < 40 * 500, "what was not read in time is merged"
