"""A continued run computes the first run's steps."""

from __future__ import annotations

from pathlib import Path

import tinker
import torch
from safetensors.torch import load_file
from tinker import ServiceClient, TrainingClient, types

from tests.support.plain_model import load, plain_logprobs
from tests.support.sdk import largest_difference, logprobs, run_tinker, sequences, supervised, train
from tests.support.stacks import TestStack
from tests.support.waiting import wait_until


def next_steps(run: TrainingClient) -> list[float]:
    """Losses of three steps, which depend on the optimizer's moments."""
    found = []
    data = [supervised(tokens) for tokens in sequences(6, seed=171)]
    for _ in range(3):
        computed = run.forward_backward(data, "cross_entropy")
        run.optim_step(types.AdamParams(learning_rate=3e-3)).result(timeout=240)
        found.append(computed.result(timeout=240).metrics["loss:sum"])
    return found


def state_of(stack: TestStack, path: str) -> dict[str, torch.Tensor]:
    """A saved state's weights, moments and step counts."""
    run_id, _kind, name = path.removeprefix("tinker://").split("/")
    folder = stack.data_dir / "checkpoints" / run_id.replace(":", "_")
    (saved,) = wait_until(
        lambda: (found := list(folder.glob(f"{name}-*"))) and len(found) == 1 and found,
        what=f"{path} has one folder",
    )
    (file,) = saved.glob("*.safetensors")
    return load_file(file)


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_a_copy_continues_as_the_source_does_in_every_weight_and_moment(
    stack: TestStack, service: ServiceClient, run: TrainingClient
) -> None:
    """In another session, after the source is deleted."""
    train(run, seed=176)
    path = run.save_state("source", overwrite=True).result(timeout=240).path
    before = state_of(stack, path)
    assert any(name.startswith("optimizer.") for name in before)
    expected = next_steps(run)
    after = state_of(stack, run.save_state("after", overwrite=True).result(240).path)
    changed = [n for n in before if n.startswith("model.") and not torch.equal(before[n], after[n])]
    assert changed, "the steps moved the weights"

    rest = tinker.RestClient(
        base_url=stack.stack.endpoint.url, api_key=stack.stack.endpoint.api_key
    )
    copy = rest.copy_weights(path, "archive").result(timeout=240)
    rest.delete_checkpoint_from_tinker_path(path).result(timeout=240)
    with stack.service() as other:
        continued = other.create_training_client_from_state_with_optimizer(copy).result(timeout=240)
        assert_same_bits(before, state_of(stack, continued.save_state("x").result(240).path))
        assert next_steps(continued) == expected
        assert_same_bits(after, state_of(stack, continued.save_state("y").result(240).path))


def test_a_downloaded_state_computes_the_trainers_logprobs_in_transformers(
    stack: TestStack, run: TrainingClient, tmp_path: Path
) -> None:
    """The download command exports a full-parameter run's state itself."""
    probes = sequences(3, seed=177)
    train(run, seed=178)
    expected = logprobs(run, probes)
    path = run.save_state("downloaded", overwrite=True).result(timeout=240).path
    train(run, seed=179)  # does not change the saved state
    endpoint = stack.stack.endpoint
    arguments = ("checkpoint", "download", path, "--output", str(tmp_path))
    run_tinker(endpoint.url, endpoint.api_key, *arguments)
    folder = tmp_path / path.removeprefix("tinker://").replace("/", "_")
    assert largest_difference(expected, plain_logprobs(load(folder), probes)) < 1e-4
