"""An engine split over two processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psutil
import pytest

from tandem.v1 import common_pb2, sampler_pb2
from tests.component.sampler.test_lora import published
from tests.support.sampler_in_flight import (
    again_if_too_late,
    assert_each_token_is_of_its_version,
    carried_over,
)
from tests.support.sampler_worker import (
    PROMPT,
    SamplerClient,
    assert_computed_by,
    publish,
    same,
    sampler_process,
    text,
)
from tests.support.worker_process import CALL_SECONDS

pytestmark = pytest.mark.nightly

NUMBERS = count(501)


@pytest.fixture(scope="module")
def split(model: Path) -> Iterator[SamplerClient]:
    """As on GPUs, with the engine in its own process."""
    with sampler_process(
        model, ranks=2, lease=1, max_lora_rank=4, max_adapters=2, engine_process="on"
    ) as client:
        yield client


def workers(client: SamplerClient) -> list[psutil.Process]:
    """vLLM's processes."""
    (engine,) = psutil.Process(client.process.pid).children()
    children = engine.children()
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


@pytest.mark.timeout(900)
def test_samples_scores_and_alternatives_are_those_of_a_plain_forward(
    split: SamplerClient, model: Path
):
    assert len(workers(split)) == 2
    asked = {"n": 3, "seed": 7, "max_tokens": 24, "stop": [], "prompt_logprobs": True}
    answer = split.sample(PROMPT, topk=3, draws=2, prompt_topk=2, **asked)
    assert_computed_by(model, PROMPT, answer)
    assert len({tuple(each.tokens) for each in answer.samples}) > 1
    assert same(split.sample(PROMPT, topk=3, draws=2, prompt_topk=2, **asked), answer)


@pytest.mark.timeout(900)
def test_samples_without_a_seed_are_drawn_alike_by_both_processes_and_never_the_same_twice(
    split: SamplerClient, model: Path
):
    answers = [split.sample(PROMPT, n=4, max_tokens=40, stop=[]) for _ in range(2)]
    for answer in answers:  # a process with other draws would continue from other tokens
        assert_computed_by(model, PROMPT, answer)
    assert not same(*answers)


@pytest.mark.timeout(900)
def test_a_version_is_loaded_by_both_processes_and_the_base_after_it(
    split: SamplerClient, model: Path, changed: Path, directory: Path
):
    version = publish(changed, directory, number=500)
    reply = split.load(version)
    assert not reply.HasField("failure"), reply.failure
    assert reply.canary_difference < 1e-4
    split.assert_serves(version, changed)
    split.assert_serves(split.base, model)


@pytest.mark.timeout(900)
def test_an_adapter_is_served_beside_the_base(split: SamplerClient, model: Path, directory: Path):
    adapter = published(model, directory, seed=9)
    split.assert_serves(adapter.version, adapter.merged)
    split.assert_serves(split.base, model)


@pytest.mark.timeout(900)
def test_what_is_in_flight_goes_on_with_other_weights_and_another_adapter_in_both_processes(
    split: SamplerClient, model: Path, changed: Path, directory: Path
):
    @again_if_too_late
    def carries_over_weights() -> None:
        full = [publish(each, directory, number=next(NUMBERS)) for each in (model, changed)]
        carries_over(full, [model, changed])

    @again_if_too_late
    def carries_over_adapters() -> None:
        adapters = [published(model, directory, seed=next(NUMBERS)) for _ in range(2)]
        carries_over([each.version for each in adapters], [each.merged for each in adapters])

    def carries_over(versions: list[common_pb2.WeightVersion], weights: list[Path]) -> None:
        split.load(versions[0])
        answer, _ = carried_over(split, versions)
        named = {version.name: at for version, at in zip(versions, weights, strict=True)}
        assert_each_token_is_of_its_version(answer, named)

    carries_over_weights()
    carries_over_adapters()


@pytest.mark.timeout(900)
def test_a_grammar_and_stop_strings_work_as_in_one_process(split: SamplerClient):
    structured = sampler_pb2.StructuredOutput(regex="[0-9]{5}")
    answer = split.sample(PROMPT, max_tokens=20, structured=structured)
    assert text(answer.samples[0].tokens).isdigit()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_wakes_with_the_same_samples(split: SamplerClient, model: Path, level: int):
    before = split.sample(PROMPT, n=2, seed=3, max_tokens=12, stop=[])
    assert not split.sleep(level).HasField("failure")
    assert not split.wake().HasField("failure")
    assert same(split.sample(PROMPT, n=2, seed=3, max_tokens=12, stop=[]), before)
    split.assert_serves(split.base, model)


@pytest.mark.timeout(900)
def test_it_ends_with_a_process_of_it_that_dies_and_leaves_none(split: SamplerClient):
    """The last test, because it ends the engine."""
    processes = [*workers(split), *psutil.Process(split.process.pid).children()]
    processes[1].kill()  # an idle one
    assert split.process.wait(timeout=CALL_SECONDS) == 1
    _gone, left = psutil.wait_procs(processes, timeout=CALL_SECONDS)
    assert not left
