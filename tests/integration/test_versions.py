"""A sampling client serves the version that it was made for, and no other."""

from __future__ import annotations

import numpy as np
from tinker import SamplingClient, TrainingClient, types

from tests.support.sdk import (
    TIMEOUT,
    largest_difference,
    logprobs,
    params,
    prompt_logprobs,
    sample,
    sequences,
    train,
)
from tests.support.stacks import TestStack, session_of


def test_an_old_sampling_client_keeps_serving_its_own_version(run: TrainingClient) -> None:
    tokens = sequences(3, seed=121)
    train(run, seed=122)
    old = run.save_weights_and_get_sampling_client().result(timeout=120)
    then = logprobs(run, tokens)
    for publish in range(3):
        train(run, seed=123 + publish)
        new = run.save_weights_and_get_sampling_client().result(timeout=120)
        assert largest_difference(then, prompt_logprobs(old, tokens)) < 1e-4
        assert largest_difference(logprobs(run, tokens), prompt_logprobs(new, tokens)) < 1e-4
        assert largest_difference(then, logprobs(run, tokens)) > 1e-2


def test_interleaved_requests_to_two_versions_never_mix(run: TrainingClient) -> None:
    """The same prompts at once to both; each answer belongs wholly to the version it asked for,
    its sampled tokens and its prompt, which a prefix cache might have kept from the other."""
    prompts = sequences(6, seed=131)
    clients, expected = [], []
    for version in range(2):
        train(run, seed=132 + version)
        clients.append(run.save_weights_and_get_sampling_client().result(timeout=120))
        expected.append(logprobs(run, prompts))
    futures = [
        (
            version,
            index,
            client.sample(
                types.ModelInput.from_ints(prompts[index]),
                num_samples=2,
                sampling_params=params(tokens=6, seed=index),
                include_prompt_logprobs=True,
            ),
        )
        for index in range(len(prompts))
        for version, client in enumerate(clients)
    ]
    wholes: dict[int, list[list[int]]] = {0: [], 1: []}
    sampled: dict[int, list[np.ndarray]] = {0: [], 1: []}
    for version, index, future in futures:
        answer = future.result(timeout=TIMEOUT)
        prompt = np.array(answer.prompt_logprobs[1:], np.float32)
        assert largest_difference([expected[version][index]], [prompt]) < 1e-4
        assert largest_difference([expected[1 - version][index]], [prompt]) > 1e-3
        for sequence in answer.sequences:
            wholes[version].append(prompts[index] + list(sequence.tokens))
            sampled[version].append(np.array(sequence.logprobs, np.float32))
    for version, client in enumerate(clients):
        scored = [each[-6:] for each in prompt_logprobs(client, wholes[version])]
        assert largest_difference(scored, sampled[version]) < 1e-4


def test_a_prompt_cached_under_the_old_weights_is_computed_anew(run: TrainingClient) -> None:
    prompt = sequences(1, seed=145, shortest=200, longest=200)[0]

    def ask(client: SamplingClient) -> tuple[int, list[int], list[np.ndarray]]:
        answer = client.sample(
            types.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params(seed=1)
        ).result(timeout=TIMEOUT)
        sequence = answer.sequences[0]
        return (
            answer.prompt_cache_hit_tokens,
            prompt + list(sequence.tokens),
            [np.array(sequence.logprobs, np.float32)],
        )

    train(run, seed=146)
    old = run.save_weights_and_get_sampling_client().result(timeout=120)
    ask(old)
    assert ask(old)[0] > 0, "the prompt is in the engine's cache"
    train(run, seed=147)
    new = run.save_weights_and_get_sampling_client().result(timeout=120)
    hits, whole, sampled = ask(new)
    assert hits == 0
    assert largest_difference([each[-8:] for each in logprobs(run, [whole])], sampled) < 1e-4


def test_a_named_version_can_be_sampled_by_its_path(
    stack: TestStack, run: TrainingClient, service
) -> None:
    train(run, seed=141)
    tokens = sequences(3, seed=142)
    path = run.save_weights_for_sampler("named").result(timeout=60).path
    assert path == f"tinker://{run.model_id}/sampler_weights/named"
    then = logprobs(run, tokens)
    train(run, seed=143)
    sampler = service.create_sampling_client(model_path=path).result(timeout=60)
    assert largest_difference(then, prompt_logprobs(sampler, tokens)) < 1e-4


def test_twenty_publishes_leave_one_engine_process_and_flat_memory(
    stack: TestStack, run: TrainingClient
) -> None:
    run.save_weights_and_get_sampling_client().result(timeout=120)
    row = next(s for s in stack.status()["samplers"] if s["base_model"] == "test/tied")
    engine = next(w for w in stack.status()["workers"] if w["id"] == row["worker"])
    resident = []
    for publish in range(20):
        train(run, seed=150 + publish, steps=1)
        sampler = run.save_weights_and_get_sampling_client().result(timeout=120)
        sample(sampler, [9, 8, 7], count=2)
        resident.append(sum(process.resident_bytes for process in stack.processes_of(engine)))
    samplers = [
        worker
        for worker in stack.status()["workers"]
        if worker["kind"] == "sampler" and session_of(run) in worker["id"]
    ]
    assert engine["pid"] in [worker["pid"] for worker in samplers], "the engine was replaced"
    assert len(samplers) == len(stack.status()["samplers"])
    # The first publishes warm caches up; a copy of engine or cache a publish would be far more.
    assert resident[-1] - resident[4] < 24 * 2**20, [size >> 20 for size in resident]
