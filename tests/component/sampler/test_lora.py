"""Adapters in a real engine equal merged weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tandem.v1 import common_pb2
from tandem.weights import Canary
from tests.support.adapter_files import ATTENTION, EVERYTHING, write_adapter_files, write_merged
from tests.support.sampler_worker import (
    PROMPT,
    SamplerClient,
    assert_computed_by,
    plain_distribution,
    plain_logprobs,
    publish,
    publish_adapter,
    rewrite_manifest,
)


@dataclass(frozen=True)
class Published:
    version: common_pb2.WeightVersion
    merged: Path


def published(model: Path, directory: Path, *, seed: int, **arguments: object) -> Published:
    folder = directory / f"adapter {model.name} {seed} {arguments}"
    files = write_adapter_files(folder / "adapter", model, seed=seed, **arguments)
    merged = write_merged(folder / "merged", model, files)
    version = publish_adapter(files, directory, number=100 + seed, merged=merged)
    return Published(version, merged)


@pytest.fixture(scope="module")
def two(model: Path, directory: Path) -> list[Published]:
    return [published(model, directory, seed=seed) for seed in (1, 2)]


def ask(client: SamplerClient, version: common_pb2.WeightVersion, **arguments: object):
    settings = {"max_tokens": 20, "stop": [], "prompt_logprobs": True, **arguments}
    return client.request(PROMPT, version=version, **settings)


@pytest.mark.parametrize("modules", [EVERYTHING, ATTENTION, ("lm_head",)])
def test_an_adapter_gives_the_logprobs_of_the_merged_weights(
    tied_adapters: SamplerClient, model: Path, directory: Path, modules
):
    adapter = published(model, directory, seed=3, modules=modules)
    difference = plain_logprobs(model, PROMPT) - plain_logprobs(adapter.merged, PROMPT)
    assert np.abs(difference).max() > 0.05, "the adapter changes nothing: the test proves nothing"
    reply = tied_adapters.load(adapter.version)
    assert not reply.HasField("failure"), reply.failure
    assert reply.canary_difference < 1e-4
    tied_adapters.assert_serves(adapter.version, adapter.merged)


def test_an_adapter_upon_an_untied_head_gives_the_logprobs_of_the_merged_weights(
    untied: SamplerClient, untied_model: Path, directory: Path
):
    adapter = published(untied_model, directory, seed=4)
    untied.assert_serves(adapter.version, adapter.merged)


def test_an_adapter_of_a_smaller_rank_is_served(
    tied_adapters: SamplerClient, model: Path, directory: Path
):
    adapter = published(model, directory, seed=5, rank=1)
    tied_adapters.assert_serves(adapter.version, adapter.merged)


def test_adapters_and_the_base_model_are_computed_in_one_batch_each_with_its_own_numbers(
    tied_adapters: SamplerClient, model: Path, two: list[Published]
):
    for adapter in two:
        tied_adapters.load(adapter.version)
    # As many adapters as fit at once, and the base model.
    kinds = [*[(a.version, a.merged) for a in two], (tied_adapters.base, model)] * 3
    answers = tied_adapters.sample_all([ask(tied_adapters, version, n=2) for version, _ in kinds])
    for (version, weights), answer in zip(kinds, answers, strict=True):
        assert answer.version == version.name
        assert_computed_by(weights, PROMPT, answer)
    described = tied_adapters.describe()
    assert described.version.name == "base/tiny"
    assert {a.version.name for a in two} <= set(described.adapters)
    assert described.max_lora_rank == 5


@pytest.fixture(scope="module")
def ten(model: Path, directory: Path) -> list[Published]:
    return [published(model, directory, seed=10 + i, modules=ATTENTION) for i in range(10)]


def test_more_adapters_at_once_than_are_computed_at_once_are_all_answered(
    tied_adapters: SamplerClient, ten: list[Published]
):
    answers = tied_adapters.sample_all([ask(tied_adapters, a.version) for a in ten])
    for adapter, answer in zip(ten, answers, strict=True):
        assert answer.version == adapter.version.name
        assert_computed_by(adapter.merged, PROMPT, answer)
    held = tied_adapters.describe().adapters
    assert len(held) == 8, "four for each that is computed at once"
    tied_adapters.assert_serves(ten[0].version, ten[0].merged)


def test_a_hundred_adapters_that_come_and_go_leave_memory_flat(
    tied_adapters: SamplerClient, ten: list[Published]
):
    def all_once() -> None:
        for adapter in ten:
            assert not tied_adapters.load(adapter.version).HasField("failure")

    for _ in range(3):
        all_once()
    before = tied_adapters.resident_bytes
    for _ in range(10):
        all_once()
    assert tied_adapters.resident_bytes - before < 8 * 2**20


def test_samples_of_an_adapter_do_not_depend_on_the_batch(
    tied_adapters: SamplerClient, two: list[Published]
):
    versions = [two[0].version, tied_adapters.base, two[1].version]

    def request(number: int):
        return ask(tied_adapters, versions[number % 3], seed=number, n=1 + number % 2, topk=2)

    together = tied_adapters.sample_all([request(number) for number in range(12)])
    for number in (0, 4, 5, 10, 11):
        (alone,) = tied_adapters.sample_all([request(number)])
        assert alone.message.sequences == together[number].message.sequences
        assert alone.message.prompt_logprobs == together[number].message.prompt_logprobs


def test_the_prefix_cache_keeps_adapters_and_base_apart(
    tied_adapters: SamplerClient, two: list[Published]
):
    prompt = [(13 * i) % 90 + 3 for i in range(96)]
    versions = [tied_adapters.base, *[adapter.version for adapter in two]]
    hits = [
        tied_adapters.sample(prompt, version=version, max_tokens=1).reply.cached_tokens
        for _ in range(2)
        for version in versions
    ]
    assert hits == [0, 0, 0, 64, 64, 64]


def test_adapters_and_full_versions_take_turns_in_one_engine(
    tied_adapters: SamplerClient, model: Path, changed: Path, directory: Path, two: list[Published]
):
    full = publish(changed, directory, number=50)
    tied_adapters.assert_serves(two[0].version, two[0].merged)
    tied_adapters.assert_serves(full, changed)
    assert tied_adapters.describe().adapters == []
    tied_adapters.assert_serves(two[0].version, two[0].merged)
    tied_adapters.assert_serves(tied_adapters.base, model)
    kinds = [(full, changed), (two[1].version, two[1].merged), (tied_adapters.base, model)]
    answers = tied_adapters.sample_all([ask(tied_adapters, version) for version, _ in kinds])
    for (_, weights), answer in zip(kinds, answers, strict=True):
        assert_computed_by(weights, PROMPT, answer)


def test_an_untied_head_survives_full_versions_between_adapters(
    untied: SamplerClient, untied_model: Path, untied_changed: Path, directory: Path
):
    adapter = published(untied_model, directory, seed=6)
    full = publish(untied_changed, directory, number=51)
    for _ in range(2):
        untied.assert_serves(full, untied_changed)
        untied.assert_serves(adapter.version, adapter.merged)
    untied.assert_serves(untied.base, untied_model)


def test_targets_and_topk_of_the_prompt_are_the_adapters(
    tied_adapters: SamplerClient, two: list[Published]
):
    prompt = [(13 * i) % 90 + 3 for i in range(40)]
    answer = tied_adapters.sample(
        prompt, version=two[0].version, max_tokens=1, prompt_topk=3, prompt_logprobs=True
    )
    expected = plain_distribution(two[0].merged, prompt)
    found = np.frombuffer(answer.message.topk_prompt_logprobs.logprobs, "<f4").reshape(-1, 3)
    assert np.abs(found[1:] - np.sort(expected, axis=1)[:, :-4:-1]).max() < 1e-4


def test_a_wrong_adapter_is_refused_and_the_others_go_on_serving(
    tied_adapters: SamplerClient, model: Path, directory: Path, two: list[Published]
):
    wrong = published(model, directory, seed=7)
    other = plain_logprobs(model, [5, 6, 7]).tolist()
    rewrite_manifest(wrong.version, canary=Canary(tokens=[5, 6, 7], logprobs=other))
    large = published(model, directory, seed=8, rank=6)
    calls = [
        tied_adapters.send(ask(tied_adapters, version))
        for version in (two[0].version, wrong.version, large.version, two[1].version)
    ]
    first, refused, too_large, last = [call.result() for call in calls]
    assert not first.HasField("failure") and not last.HasField("failure")
    assert refused.failure.type == "load_failed"
    assert "differ from the trainer's" in refused.failure.message
    assert too_large.failure.type == "load_failed"
    assert "rank 6" in too_large.failure.message
    assert tied_adapters.load(wrong.version).failure.type == "load_failed"
    tied_adapters.assert_serves(two[0].version, two[0].merged)


def test_an_adapter_as_peft_saves_it_is_served(
    tied_adapters: SamplerClient, model: Path, directory: Path
):
    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    network = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "down_proj"]),
    )
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    files = directory / "saved by peft"
    network.save_pretrained(files)
    (files / "README.md").unlink(missing_ok=True)
    merged = directory / "merged by peft"
    network.merge_and_unload().save_pretrained(merged)
    version = publish_adapter(files, directory, number=99, merged=merged)
    tied_adapters.assert_serves(version, merged)
