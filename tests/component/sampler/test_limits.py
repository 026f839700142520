"""Requests take turns on an engine with little room (`tied_adapters`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from sampler_service.vllm.environment import _intel_openmp, is_cpu_build, sampler_environment
from tandem.v1 import sampler_pb2
from tests.support.sampler_worker import SamplerClient, plain_logprobs, same, sampler_process
from tests.support.tiny_model import VOCABULARY, write_tiny_model


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCABULARY, 40 + number).tolist() for number in range(count)]


def test_samples_are_the_same_when_requests_push_each_other_out_of_the_cache(
    tied_adapters: SamplerClient, sampler: SamplerClient, model: Path
):
    def requests(client: SamplerClient) -> list[sampler_pb2.SampleRequest]:
        return [
            client.request(
                prompt, seed=number, max_tokens=150, stop=[], prompt_logprobs=number % 2 == 0
            )
            for number, prompt in enumerate(prompts(24))
        ]

    tight, roomy = (client.sample_all(requests(client)) for client in (tied_adapters, sampler))
    for number, (one, other) in enumerate(zip(tight, roomy, strict=True)):
        assert [s.tokens for s in one.samples] == [s.tokens for s in other.samples]
        if number % 2 == 0:
            assert one.prompt_logprobs is not None
            expected = plain_logprobs(model, prompts(24)[number])
            assert np.abs(one.prompt_logprobs[1:] - expected).max() < 1e-4


_TELL_WHAT_BEGINS = """
import sys
from pathlib import Path
from sampler_service.engine import EngineRequest
from sampler_service.vllm.libraries import import_libraries

import_libraries()

from sampler_service.vllm.engine import VllmEngine
from tandem.settings.workers import SamplerSettings

settings = SamplerSettings(device="cpu", max_num_seqs=2, kv_cache_bytes=2**20)
engine = VllmEngine(Path(sys.argv[1]), settings)
for name, tokens, samples in ("a/1", 2, 1), ("b-2", 4, 1), ("c#3", 2, 1), ("short", 1, 3):
    engine.add(EngineRequest(id=name, prompt=[3, 4], num_samples=samples, max_tokens=tokens))
ended = []
while len(ended) < 4:
    step = engine.step()
    print("STEP", *sorted(step.begun), "|", *sorted(result.id for result in step.results))
    ended += step.results
"""


def test_the_engine_says_which_requests_it_has_begun(model: Path):
    environment = sampler_environment(os.environ, cpu=is_cpu_build(), library=_intel_openmp())
    done = subprocess.run(
        [sys.executable, "-c", _TELL_WHAT_BEGINS, str(model)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    steps = [line for line in done.stdout.splitlines() if line.startswith("STEP")]
    assert steps == [
        "STEP a/1 b-2 |",
        "STEP | a/1",
        "STEP c#3 |",
        "STEP | b-2 c#3",
        "STEP short |",
        "STEP | short",
    ]


def test_a_sequence_is_as_long_as_the_cache_holds_where_the_model_allows_more(directory: Path):
    long = write_tiny_model(directory / "long", head_dim=32, max_length=100_000)
    with sampler_process(long, kv_cache_bytes=2**20) as client:
        longest = client.describe().max_length
        assert 1000 < longest < 2000
        prompt = [5] * (longest - 1)
        assert client.sample(prompt, max_tokens=1, stop=[]).reply.max_length == longest
        refusal = client.refusal(client.request([*prompt, 5], max_tokens=1))
        assert refusal.type == "sequence_too_long"
        assert f"> {longest}. The model's own length is 100000" in refusal.message


def test_more_requests_than_sequences_are_all_answered(tied_adapters: SamplerClient):
    answers = tied_adapters.sample_all(
        [
            tied_adapters.request([5, 9], n=5, seed=number, max_tokens=5, stop=[])
            for number in range(20)
        ]
    )
    assert same(answers[3], tied_adapters.sample([5, 9], n=5, seed=3, max_tokens=5, stop=[]))
