"""vLLM schedules a step while another is computed, as on a GPU.

Empty streams make the CPU build do it in a GPU's order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sampler_service.vllm.environment import _intel_openmp, is_cpu_build, sampler_environment
from tests.support.sampler_worker import SamplerClient, text, tokens_of

pytestmark = pytest.mark.nightly

_RUN = """
import json, sys
from pathlib import Path

import torch

class Nothing:
    def __init__(self, *arguments, **named):
        self.device = torch.device("cpu")
    def __enter__(self):
        return self
    def __exit__(self, *error):
        pass
    def record(self, *stream):
        pass
    synchronize = wait = wait_event = wait_stream = record

torch.Event = torch.cuda.Event = torch.cuda.Stream = torch.cuda.current_stream = Nothing
torch.cuda.stream = lambda stream: stream

from sampler_service.vllm.libraries import import_libraries

import_libraries()

import sampler_service.vllm.engine as module
from sampler_service.engine import EngineRequest, PromptScoring
from sampler_service.structured_output import Grammar, GrammarCache
from tandem.settings.workers import SamplerSettings

configure = module.engine_config

def asynchronous(args, *, fit):
    config = configure(args, fit=fit)
    config.scheduler_config.async_scheduling = True
    return config

module.engine_config = asynchronous
model, prompts = Path(sys.argv[1]), json.loads(sys.argv[2])
engine = module.VllmEngine(model, SamplerSettings(device="cpu", kv_cache_bytes=2**24))
core = engine._engine.engine_core.engine_core
assert core.batch_queue is not None
facts = engine.facts
digits = GrammarCache(model).compile(
    Grammar("regex", "([0-9]{3}-){6}"), vocabulary=facts.vocabulary, end_tokens=facts.end_tokens
)

def run(*, pause_at=()):
    for number, prompt in enumerate(prompts):
        engine.add(EngineRequest(
            id=str(number), prompt=prompt, num_samples=3, max_tokens=20 + number, seed=number,
            stop_token_ids=(1,), scoring=PromptScoring(first=1),
        ))
    engine.add(EngineRequest(
        id="digits", prompt=[5, 6], num_samples=2, max_tokens=40, stop_token_ids=(1,),
        grammar=digits,
    ))
    engine.add(EngineRequest(id="dropped", prompt=[5, 6], num_samples=2, max_tokens=400))
    ended, steps, ahead = {}, 0, 0
    while len(ended) <= len(prompts):
        outputs = [engine.step()]
        steps += 1
        if steps == 4:
            engine.abort(["dropped"])
        if steps in pause_at:
            ahead += len(core.batch_queue)
            outputs.append(engine.settle())
            assert not core.batch_queue
            engine.pause()
            engine.carry_over([*map(str, range(len(prompts)))])
            assert engine.reset_prefix_cache()
            engine.score([5, 6, 7])
            engine.resume()
        for output in outputs:
            for result in output.results:
                assert result.failure is None, result.failure
                assert result.id not in ended
                ended[result.id] = result
    assert not engine.settle().results and not core.batch_queue
    assert engine.reset_prefix_cache(), "nothing is left in the cache"
    return ended, ahead

results = []
for pauses in (), (3, 9, 15):
    ended, ahead = run(pause_at=pauses)
    assert bool(ahead) == bool(pauses)
    results.append({
        id_: [(s.tokens.tolist(), s.logprobs.tolist(), s.carried_at) for s in result.samples]
        for id_, result in ended.items()
    })
print("RESULTS", json.dumps(results))
"""


def test_samples_are_the_same_and_a_pause_takes_none_twice(sampler: SamplerClient, model: Path):
    prompts = [[(7 * i + 5 * number) % 90 + 3 for i in range(20 + number)] for number in range(5)]
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(model), json.dumps(prompts)],
        env=sampler_environment(os.environ, cpu=is_cpu_build(), library=_intel_openmp()),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    plain, paused = json.loads(done.stdout.partition("RESULTS ")[2])
    for number, prompt in enumerate(prompts):
        expected = sampler.sample(prompt, n=3, seed=number, max_tokens=20 + number)
        for results in (plain, paused):
            tokens, logprobs, _ = zip(*results[str(number)], strict=True)
            assert [*tokens] == tokens_of(expected)
            assert [*logprobs] == [sample.logprobs.tolist() for sample in expected.samples]
    assert any(len(carried) == 3 for _, _, carried in paused["0"])
    for tokens, _, _ in (*plain["digits"], *paused["digits"]):
        assert re.fullmatch("([0-9]{3}-){6}", text(tokens))
