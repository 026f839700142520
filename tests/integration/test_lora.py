"""LoRA runs on the real stack: served adapters have the trainer's numbers, and runs keep apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tinker import SamplingClient, ServiceClient, TrainingClient, types

from tests.support.plain_model import load, plain_logprobs
from tests.support.sdk import (
    START,
    TIMEOUT,
    adam,
    largest_difference,
    logprobs,
    outputs,
    prompt_logprobs,
    rewind,
    sample,
    sequences,
    supervised,
    train,
)
from tests.support.stacks import TIED, TestStack, session_of

TOLERANCE = 1e-4
TOKENS = sequences(5, seed=71)


@pytest.fixture(scope="module")
def together(stack: TestStack) -> Iterator[ServiceClient]:
    """One session for all runs here."""
    with stack.service() as service:
        yield service


@pytest.fixture(scope="module")
def three(together: ServiceClient) -> dict[str, TrainingClient]:
    """Two ranks and all parameters. The largest rank comes first, and its engine serves all: the
    others are asked for once it is there, as the SDK sends what is asked for at once in any order.
    """
    wide = together.create_lora_training_client(TIED, rank=12, seed=3).result(timeout=240)
    futures = {
        "narrow": together.create_lora_training_client(TIED, rank=4, seed=7),
        "full": together.create_lora_training_client(f"{TIED}:full"),
    }
    clients = {"wide": wide}
    clients |= {name: future.result(timeout=240) for name, future in futures.items()}
    for client in clients.values():
        client.save_state(START).result(timeout=TIMEOUT)
    return clients


@pytest.fixture
def runs(three: dict[str, TrainingClient]) -> dict[str, TrainingClient]:
    return {name: rewind(client) for name, client in three.items()}


@pytest.fixture(scope="module")
def base(models: dict[str, Path]) -> torch.nn.Module:
    return load(models[TIED])


def serve(training: TrainingClient, kind: types.SamplingClientKind = "snapshot") -> SamplingClient:
    return training.save_weights_and_get_sampling_client(kind=kind).result(timeout=TIMEOUT)


def test_an_adapter_begins_as_the_base_model(
    runs: dict[str, TrainingClient], base: torch.nn.Module
) -> None:
    expected = plain_logprobs(base, TOKENS)
    for name in ("wide", "narrow"):
        assert largest_difference(logprobs(runs[name], TOKENS), expected) < TOLERANCE
        assert largest_difference(prompt_logprobs(serve(runs[name]), TOKENS), expected) < TOLERANCE


@pytest.mark.parametrize("name", ["wide", "narrow"])
def test_a_served_adapter_equals_the_trainer_and_the_merged_weights(
    runs: dict[str, TrainingClient],
    name: str,
    stack: TestStack,
    models: dict[str, Path],
    base: torch.nn.Module,
) -> None:
    peft = pytest.importorskip("peft")
    train(runs[name], seed=72)
    sampler = serve(runs[name])
    trained = logprobs(runs[name], TOKENS)
    served = prompt_logprobs(sampler, TOKENS)
    assert largest_difference(trained, plain_logprobs(base, TOKENS)) > 100 * TOLERANCE
    assert largest_difference(trained, served) < TOLERANCE
    folder = stack.newest_version(runs[name])
    merged = peft.PeftModel.from_pretrained(_untied(models[TIED]), folder).merge_and_unload()
    assert largest_difference(plain_logprobs(merged, TOKENS), served) < TOLERANCE
    (sequence,) = sample(sampler, TOKENS[0], tokens=10, seed=1)
    whole = [*TOKENS[0], *sequence.tokens]
    sampled = [np.array(sequence.logprobs, np.float32)]
    assert largest_difference([logprobs(runs[name], [whole])[0][-10:]], sampled) < TOLERANCE


def test_an_adapter_is_published_alone(runs: dict[str, TrainingClient], stack: TestStack) -> None:
    sizes = {}
    for name, training in runs.items():
        serve(training)
        sizes[name] = sum(each.nbytes for each in stack.published(training).values())
    assert sizes["narrow"] * 2 < sizes["wide"] < sizes["full"]


def test_snapshots_stay_and_inflight_samplers_follow_while_training_goes_on(
    runs: dict[str, TrainingClient],
) -> None:
    training = runs["narrow"]
    train(training, seed=73)
    snapshot, early = serve(training), serve(training, "inflight")
    frozen = prompt_logprobs(snapshot, TOKENS)
    for seed in (74, 75):
        train(training, seed=seed)
        late = serve(training, "inflight")
        now = logprobs(training, TOKENS)
        assert largest_difference(now, frozen) > 100 * TOLERANCE, "the weights hardly moved"
        for inflight in (early, late):
            assert largest_difference(prompt_logprobs(inflight, TOKENS), now) < TOLERANCE
        assert largest_difference(prompt_logprobs(snapshot, TOKENS), frozen) < TOLERANCE


def test_several_versions_of_a_run_are_served_at_once(runs: dict[str, TrainingClient]) -> None:
    training = runs["wide"]
    samplers, expected = [], []
    for seed in (76, 77, 78):
        train(training, seed=seed, steps=2)
        samplers.append(serve(training))
        expected.append(logprobs(training, TOKENS))
    futures = [
        [sampler.compute_logprobs(types.ModelInput.from_ints(tokens)) for sampler in samplers]
        for tokens in TOKENS
    ]  # interleaved: no version waits until another is done
    for number, trained in enumerate(expected):
        answers = [each[number].result(timeout=TIMEOUT) for each in futures]
        served = [np.array(answer[1:], np.float32) for answer in answers]
        assert largest_difference(served, trained) < TOLERANCE


def test_runs_in_one_session_do_not_touch_each_other(
    runs: dict[str, TrainingClient], together: ServiceClient, base: torch.nn.Module
) -> None:
    """To the bit in the trainers. The three share an engine, which has to keep them apart."""
    before = {name: logprobs(training, TOKENS) for name, training in runs.items()}
    samplers = {name: serve(training) for name, training in runs.items()}
    for moved in runs:
        train(runs[moved], seed=79)
        now = {name: logprobs(training, TOKENS) for name, training in runs.items()}
        for name in runs:
            difference = largest_difference(now[name], before[name])
            assert difference > 100 * TOLERANCE if name == moved else difference == 0.0
        samplers[moved] = serve(runs[moved])
        for name, sampler in samplers.items():
            assert largest_difference(prompt_logprobs(sampler, TOKENS), now[name]) < TOLERANCE
        before = now
    of_base = together.create_sampling_client(base_model=TIED).result(timeout=TIMEOUT)
    served = prompt_logprobs(of_base, TOKENS)
    assert largest_difference(served, plain_logprobs(base, TOKENS)) < TOLERANCE


def test_one_engine_serves_the_whole_session(
    runs: dict[str, TrainingClient], stack: TestStack
) -> None:
    session_id = session_of(runs["wide"])
    mine = [s for s in stack.status()["samplers"] if s["session_id"] == session_id]
    assert [s["max_lora_rank"] for s in mine] == [16]


def test_a_seed_decides_how_an_adapter_learns(
    together: ServiceClient, runs: dict[str, TrainingClient]
) -> None:
    """The same seed is the same run, to the bit; another one is another."""
    twins = [together.create_lora_training_client(TIED, rank=4, seed=seed) for seed in (7, 8)]
    same, other = (twin.result(timeout=240) for twin in twins)
    found = []
    for training in (runs["narrow"], same, other):
        train(training, seed=80, steps=2)
        found.append(logprobs(training, TOKENS))
    assert largest_difference(found[0], found[1]) == 0.0
    assert largest_difference(found[0], found[2]) > TOLERANCE


def test_a_run_with_dimuon_learns(together: ServiceClient) -> None:
    training = together.create_lora_training_client(
        TIED, rank=8, seed=1, optimizer=types.DimuonOptimizerConfig()
    ).result(timeout=240)
    data = [supervised([20, 30, 40, 50, 60, 70, 80])]
    losses = []
    for _ in range(12):
        result = training.forward_backward(data, "cross_entropy").result(timeout=TIMEOUT)
        losses.append(result.metrics["loss:sum"])
        training.optim_step(types.DimuonParams(learning_rate=2e-2)).result(timeout=TIMEOUT)
    assert losses[-1] < losses[0] / 2
    assert all(np.isfinite(outputs(result)[0]))
    sampler = serve(training)
    tokens = [[20, 30, 40, 50, 60, 70, 80]]
    assert largest_difference(prompt_logprobs(sampler, tokens), logprobs(training, tokens)) < (
        TOLERANCE
    )


def test_a_named_adapter_is_sampled_from_in_another_session(
    runs: dict[str, TrainingClient], stack: TestStack
) -> None:
    training = runs["narrow"]
    training.forward_backward([supervised(TOKENS[0])], "cross_entropy")
    training.optim_step(adam()).result(timeout=TIMEOUT)
    path = training.save_weights_for_sampler("elsewhere").result(timeout=TIMEOUT).path
    expected = logprobs(training, TOKENS)
    with stack.service() as service:
        sampler = service.create_sampling_client(model_path=path).result(timeout=TIMEOUT)
        assert largest_difference(prompt_logprobs(sampler, TOKENS), expected) < TOLERANCE


def _untied(path: Path) -> torch.nn.Module:
    """What is added to the unembedding must not change the embedding as well."""
    model = load(path)
    head = torch.nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)
    head.weight.data = model.lm_head.weight.data.clone()
    model.lm_head = head
    model.config.tie_word_embeddings = False
    return model
