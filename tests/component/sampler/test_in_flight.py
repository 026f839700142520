"""Requests in flight continue on newer weights."""

from __future__ import annotations

import re
from itertools import chain, count
from pathlib import Path

import numpy as np
import pytest

from tandem.v1 import common_pb2, sampler_pb2
from tests.support.adapter_files import write_adapter_files, write_merged
from tests.support.sampler_in_flight import (
    LONG,
    TooLateError,
    Weights,
    again_if_too_late,
    assert_each_token_is_of_its_version,
    carried_over,
    scored_by_its_versions,
)
from tests.support.sampler_streams import gather, open_stream
from tests.support.sampler_worker import (
    PROMPT,
    SamplerClient,
    assert_computed_by,
    decoded,
    plain_logprobs,
    publish,
    publish_adapter,
    text,
)
from tests.support.waiting import wait_until

NUMBERS = count(1000)
"""Version numbers, always newer than those of earlier tests."""


@pytest.fixture
def versions(
    model: Path, changed: Path, directory: Path
) -> tuple[list[common_pb2.WeightVersion], Weights]:
    return two_versions(model, changed, directory)


def two_versions(
    model: Path, changed: Path, directory: Path
) -> tuple[list[common_pb2.WeightVersion], Weights]:
    published = [publish(each, directory, number=next(NUMBERS)) for each in (model, changed)]
    return published, {published[0].name: model, published[1].name: changed}


@again_if_too_late
def test_tokens_before_a_load_are_of_the_old_version_and_those_after_it_of_the_new(
    either: SamplerClient, model: Path, changed: Path, directory: Path
):
    (old, new), weights = two_versions(model, changed, directory)
    either.load(old)
    digits = sampler_pb2.StructuredOutput(regex="([0-9]{3}-){110}")  # longer than the first answer
    either.sample(PROMPT, version=old, max_tokens=1, structured=digits)  # compiles the grammar
    others = [
        either.request(PROMPT, version=old, in_flight=True, n=2, seed=5, max_tokens=LONG, stop=[]),
        either.request(
            PROMPT, version=old, in_flight=True, max_tokens=450, structured=digits, seed=6
        ),
        either.request(PROMPT, version=old, in_flight=True, max_tokens=2, stop=[]),
        either.request(
            PROMPT, version=old, in_flight=True, max_tokens=LONG, stop=["zz"], temperature=0.0, n=2
        ),
    ]
    answer, (seeded, regex, short, greedy) = carried_over(either, [old, new], others)
    for each in (answer, seeded, short, greedy):
        assert_each_token_is_of_its_version(each, weights)
    assert answer.version == new.name
    assert answer.prompt_logprobs is not None
    assert np.abs(answer.prompt_logprobs[1:] - plain_logprobs(model, PROMPT)).max() < 1e-4
    assert len(regex.message.sequences[0].tandem_versions) == 2
    assert re.fullmatch("([0-9]{3}-){110}", text(regex.samples[0].tokens))
    assert either.metric("tandem_sampler_carried_over_total") >= 1
    either.assert_serves(new, weights[new.name])  # the cache keeps nothing of the old version
    either.assert_serves(either.base, model)


def test_a_request_that_is_not_in_flight_ends_with_its_version_before_the_load(
    sampler: SamplerClient, versions: tuple[list[common_pb2.WeightVersion], Weights]
):
    (old, new), weights = versions
    sampler.load(old)
    request = sampler.request(PROMPT, version=old, n=2, max_tokens=LONG, stop=[])
    events = open_stream(sampler, request)
    first = next(events)
    assert sampler.load(new, in_flight=True).version.name == new.name
    answer = gather(chain([first], events)).answer
    assert answer.version == old.name
    assert not any(sequence.tandem_versions for sequence in answer.message.sequences)
    assert_computed_by(weights[old.name], PROMPT, answer)


def test_a_version_that_is_refused_leaves_what_is_under_way_with_the_old_one(
    sampler: SamplerClient,
    versions: tuple[list[common_pb2.WeightVersion], Weights],
    directory: Path,
):
    (old, new), weights = versions
    sampler.load(old)
    next(Path(new.path).glob("*.safetensors")).write_bytes(b"damaged")
    request = sampler.request(PROMPT, version=old, in_flight=True, max_tokens=LONG, stop=[])
    events = open_stream(sampler, request)
    first = next(events)
    assert sampler.load(new, in_flight=True).failure.type == "load_failed"
    answer = gather(chain([first], events)).answer
    assert answer.version == old.name
    assert_computed_by(weights[old.name], PROMPT, answer)


@again_if_too_late
def test_requests_go_on_with_the_next_adapter_while_others_keep_theirs(
    tied_adapters: SamplerClient, model: Path, directory: Path
):
    published, weights = [], {}
    for number in (next(NUMBERS), next(NUMBERS)):
        folder = directory / f"in flight {number}"
        files = write_adapter_files(folder / "adapter", model, seed=number)
        merged = write_merged(folder / "merged", model, files)
        version = publish_adapter(files, directory, number=number, merged=merged)
        published.append(version)
        weights[version.name] = merged
    old, _ = published
    tied_adapters.load(old)
    others = [
        tied_adapters.request(PROMPT, version=version, n=2, max_tokens=150, stop=[])
        for version in (old, tied_adapters.base)
    ]
    answer, (fixed, base) = carried_over(
        tied_adapters, published, others, n=2, max_tokens=250, prompt_logprobs=False
    )
    assert_each_token_is_of_its_version(answer, weights)
    assert scored_by_its_versions(tied_adapters, published, answer) < 1e-4
    assert fixed.version == old.name
    assert_computed_by(weights[old.name], PROMPT, fixed)
    assert_computed_by(model, PROMPT, base)


@again_if_too_late
def test_a_load_ends_aborted_requests_with_their_tokens_and_carries_kept_ones_over(
    either: SamplerClient, model: Path, changed: Path, directory: Path
):
    (old, new), weights = two_versions(model, changed, directory)
    either.load(old)
    settings = {"version": old, "in_flight": True, "max_tokens": LONG, "stop": []}
    aborted, kept = (
        either.request(PROMPT, n=2, seed=seed, prompt_logprobs=True, **settings) for seed in (5, 6)
    )
    aborted.updates, kept.updates = sampler_pb2.UPDATES_ABORT, sampler_pb2.UPDATES_KEEP
    streamed = open_stream(either, aborted)
    call, first = either.send(kept), next(streamed)
    wait_until(lambda: either.describe().running != 1, what="both have begun, or ended")
    assert either.load(new).version.name == new.name
    partial = gather(chain([first], streamed))
    answer = decoded(call.result())
    if len(partial.answer.samples[0].tokens) == LONG:
        raise TooLateError
    assert partial.adds_up()
    for sample in partial.answer.samples:
        assert 0 < len(sample.tokens) == len(sample.logprobs) < LONG and not sample.stopped
    assert partial.answer.version == old.name
    assert_computed_by(weights[old.name], PROMPT, partial.answer)
    assert answer.version == new.name
    assert_each_token_is_of_its_version(answer, weights)
    either.assert_serves(new, weights[new.name])
