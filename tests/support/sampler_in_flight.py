"""Requests of a real sampler that are carried over to newer weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tandem.v1 import common_pb2, sampler_pb2
from tests.support.sampler_streams import gather, open_stream
from tests.support.sampler_worker import PROMPT, Sampled, SamplerClient, decoded, plain_logprobs
from tests.support.waiting import wait_until

LONG = 400
"""Some tokens are drawn before the newer version, and most after it."""

Weights = dict[str, Path]


class TooLateError(AssertionError):
    """All tokens were sampled before the newer version was loaded."""


def again_if_too_late(test: Callable[..., None]) -> Callable[..., None]:
    """Repeat a test with newer versions if the machine was too slow for it."""

    @wraps(test)
    def repeated(**fixtures: Any) -> None:
        for _ in range(9):
            with suppress(TooLateError):
                return test(**fixtures)
        return test(**fixtures)

    return repeated


def assert_each_token_is_of_its_version(answer: Sampled, weights: Weights) -> None:
    for sample, sequence in zip(answer.samples, answer.message.sequences, strict=True):
        start, runs = 0, sequence.tandem_versions
        assert sum(run.tokens for run in runs) == len(sample.tokens)
        for run in runs:
            all_of_it = plain_logprobs(weights[run.version], [*PROMPT, *sample.tokens])
            part = slice(start, start := start + run.tokens)
            expected = all_of_it[len(PROMPT) - 1 :][part]
            assert np.abs(expected - sample.logprobs[part]).max() < 1e-4


def carried_over(
    client: SamplerClient,
    versions: Sequence[common_pb2.WeightVersion],
    others: Sequence[sampler_pb2.SampleRequest] = (),
    **arguments: Any,
) -> tuple[Sampled, list[Sampled]]:
    """Sample from the first version while the second is loaded, both in flight.

    Returns the answer, and the answers of `others`, which begin before the load."""
    settings = {"n": 3, "max_tokens": LONG, "stop": [], "prompt_logprobs": True, **arguments}
    request = client.request(PROMPT, version=versions[0], in_flight=True, **settings)
    events = open_stream(client, request)
    calls = [client.send(other) for other in others]
    first = next(events)
    long = sum(other.in_flight and other.params.max_tokens > 2 for other in others)

    def begun() -> bool:
        found = client.describe()
        return found.running > long or not found.running + found.waiting

    wait_until(begun, what="the others have begun, or all is over")
    reply = client.load(versions[1], in_flight=True)
    assert not reply.HasField("failure"), reply.failure
    assert reply.version.name == versions[1].name
    streamed = gather(chain([first], events))
    assert streamed.adds_up()
    sequences = streamed.answer.message.sequences
    if {run.version for each in sequences for run in each.tandem_versions} == {versions[0].name}:
        raise TooLateError
    for index, sequence in enumerate(sequences):
        runs = [(run.version, run.step, run.tokens) for run in sequence.tandem_versions]
        assert [run[:2] for run in runs] == [(each.name, each.step) for each in versions]
        told = [name for name, _, tokens in runs for _ in range(tokens)]
        assert streamed.samples[index].versions == told
    return streamed.answer, [decoded(call.result()) for call in calls]


def scored_by_its_versions(
    client: SamplerClient, versions: Sequence[common_pb2.WeightVersion], answer: Sampled
) -> float:
    """Return the largest difference between sampled logprobs and the engine's scores."""
    differences = [0.0]
    for sample, sequence in zip(answer.samples, answer.message.sequences, strict=True):
        whole, start = [*PROMPT, *sample.tokens], 0
        for run in sequence.tandem_versions:
            (version,) = (each for each in versions if each.name == run.version)
            scores = client.sample(whole, version=version, max_tokens=1, prompt_logprobs=True)
            assert scores.prompt_logprobs is not None
            part = slice(start, start := start + run.tokens)
            difference = scores.prompt_logprobs[len(PROMPT) :][part] - sample.logprobs[part]
            differences.append(float(np.abs(difference).max()))
    return max(differences)
