"""A run that is continued from a checkpoint computes what the first one went on to compute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from tinker import ServiceClient, TrainingClient, types
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.plain_model import load, plain_logprobs
from tests.support.sdk import largest_difference, logprobs, sequences, supervised, train
from tests.support.stacks import LLAMA, TestStack
from tests.support.waiting import wait_until


def next_steps(run: TrainingClient) -> list[float]:
    """Losses of three further steps, whose size depends on the optimizer's moments."""
    found = []
    data = [supervised(tokens) for tokens in sequences(6, seed=171)]
    for _ in range(3):
        computed = run.forward_backward(data, "cross_entropy")
        run.optim_step(types.AdamParams(learning_rate=3e-3)).result(timeout=60)
        found.append(computed.result(timeout=60).metrics["loss:sum"])
    return found


def test_a_run_created_from_a_state_with_optimizer_continues_exactly(
    stack: TestStack, service: ServiceClient, run: TrainingClient
) -> None:
    probes = sequences(3, seed=172)
    train(run, seed=173)
    path = run.save_state("middle", overwrite=True).result(timeout=60).path
    saved = logprobs(run, probes)
    expected = next_steps(run)
    run.save_weights_and_get_sampling_client().result(timeout=120)

    future = service.create_training_client_from_state_with_optimizer(path)
    continued = future.result(timeout=120)
    assert continued.model_id != run.model_id
    assert largest_difference(saved, logprobs(continued, probes)) == 0
    assert next_steps(continued) == expected
    continued.save_weights_and_get_sampling_client().result(timeout=120)
    before, after = stack.published(run), stack.published(continued)
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor, err_msg=name)


def test_without_the_optimizer_the_weights_are_the_same_and_its_moments_start_afresh(
    service: ServiceClient, run: TrainingClient
) -> None:
    probes = sequences(3, seed=174)
    train(run, seed=175)
    path = run.save_state("middle-2", overwrite=True).result(timeout=60).path
    saved = logprobs(run, probes)
    expected = next_steps(run)

    fresh = service.create_training_client_from_state(path).result(timeout=120)
    assert largest_difference(saved, logprobs(fresh, probes)) == 0
    found = next_steps(fresh)
    assert found[0] == expected[0], "the same weights have the same next loss"
    assert found[1:] != pytest.approx(expected[1:], rel=1e-4), "the moments were not kept"


def state_of(stack: TestStack, path: str, scratch: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a saved state: weights, moments and step counts."""
    run_id, _kind, name = path.removeprefix("tinker://").split("/")
    folder = stack.data_dir / "checkpoints" / run_id.replace(":", "_")
    (saved,) = wait_until(
        lambda: (found := list(folder.glob(f"{name}-*"))) and len(found) == 1 and found,
        what=f"{path} has one folder",
    )
    flat = scratch / "flat.pt"
    dcp_to_torch_save(saved, flat)
    return torch.load(flat)


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_a_copy_continues_as_the_source_does_in_every_weight_and_moment(
    stack: TestStack, service: ServiceClient, run: TrainingClient, tmp_path: Path
) -> None:
    """From another session, after the source is deleted, and while the first run went on."""
    train(run, seed=176)
    path = run.save_state("source", overwrite=True).result(timeout=60).path
    before = state_of(stack, path, tmp_path)
    assert any(name.startswith("optimizer.") for name in before)
    expected = next_steps(run)
    after = state_of(stack, run.save_state("after", overwrite=True).result(60).path, tmp_path)
    changed = [n for n in before if n.startswith("model.") and not torch.equal(before[n], after[n])]
    assert changed, "the steps moved the weights"

    rest = tinker.RestClient(
        base_url=stack.stack.endpoint.url, api_key=stack.stack.endpoint.api_key
    )
    copy = rest.copy_weights(path, "archive").result(timeout=60)
    rest.delete_checkpoint_from_tinker_path(path).result(timeout=60)
    with stack.service() as other:
        continued = other.create_training_client_from_state_with_optimizer(copy).result(timeout=120)
        assert_same_bits(
            before, state_of(stack, continued.save_state("x").result(60).path, tmp_path)
        )
        assert next_steps(continued) == expected
        assert_same_bits(
            after, state_of(stack, continued.save_state("y").result(60).path, tmp_path)
        )


@pytest.fixture
def checkpoint_command(stack: TestStack):
    """The SDK's published command line, as a process of its own."""
    endpoint = stack.stack.endpoint
    environment = {
        **os.environ,
        "TINKER_BASE_URL": endpoint.url,
        "TINKER_API_KEY": endpoint.api_key,
    }

    def run(*arguments: str) -> None:
        command = [sys.executable, "-m", "tinker.cli", "-f", "json", "checkpoint", *arguments]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr

    return run


def test_a_downloaded_checkpoint_computes_the_trainers_logprobs_in_transformers(
    stack: TestStack, run: TrainingClient, checkpoint_command, tmp_path: Path
) -> None:
    """By both ways: an export, and a training state that the command exports itself."""
    probes = sequences(3, seed=177)
    train(run, seed=178)
    expected = logprobs(run, probes)
    external = run.save_weights_external("downloaded").result(timeout=120).path
    state = run.save_state("downloaded", overwrite=True).result(timeout=60).path
    train(run, seed=179)  # the export stays what it was
    assert largest_difference(expected, logprobs(run, probes)) > 1e-2
    for path in (external, state):
        checkpoint_command("download", path, "--output", str(tmp_path))
        folder = tmp_path / path.removeprefix("tinker://").replace("/", "_")
        assert largest_difference(expected, plain_logprobs(load(folder), probes)) < 1e-4


def test_download_addresses_of_a_real_gateway_serve_parts_and_refuse_changes(
    stack: TestStack, run: TrainingClient
) -> None:
    path = run.save_weights_external("signed").result(timeout=120).path
    endpoint = stack.stack.endpoint
    rest = tinker.RestClient(base_url=endpoint.url, api_key=endpoint.api_key)
    url = rest.get_external_weights_urls(path).result(timeout=60).urls["model.safetensors"]
    whole = httpx.get(url, timeout=60).content
    part = httpx.get(url, headers={"Range": "bytes=100-199"}, timeout=60)
    assert (part.status_code, part.content) == (206, whole[100:200])
    assert httpx.get(url.replace("model.safetensors", "config.json"), timeout=60).status_code == 403


def test_an_adapters_state_continues_exactly_and_its_download_loads_in_peft(
    stack: TestStack,
    service: ServiceClient,
    models: dict[str, Path],
    checkpoint_command,
    tmp_path: Path,
) -> None:
    probes = sequences(3, seed=180)
    adapter = service.create_lora_training_client(LLAMA, rank=4, seed=5).result(timeout=240)
    untrained = logprobs(adapter, probes)
    train(adapter, seed=181)
    expected = logprobs(adapter, probes)
    assert largest_difference(untrained, expected) > 1e-2
    external = adapter.save_weights_external("adapter").result(timeout=120).path
    state = adapter.save_state("adapter").result(timeout=60).path
    continued = service.create_training_client_from_state_with_optimizer(state).result(timeout=240)
    assert continued.get_info().lora_rank == 4
    assert next_steps(continued) == next_steps(adapter)

    for path in (external, state):
        checkpoint_command("download", path, "--output", str(tmp_path))
        folder = tmp_path / path.removeprefix("tinker://").replace("/", "_")
        loaded = PeftModel.from_pretrained(load(models[LLAMA]), folder)
        assert largest_difference(expected, plain_logprobs(loaded, probes)) < 1e-4
