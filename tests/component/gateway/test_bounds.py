"""Bounds on the weights of samples: `min_version` and `max_staleness`.

A run's first save for sampling is version 1 of step 0. Each further save follows one step."""

from __future__ import annotations

import pytest
import tinker
from tinker import types

from tests.support.gateway.running import Gate
from tests.support.waiting import wait_until

OWN = "/api/tandem/v1"
PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=3)
DATUM = types.Datum(
    model_input=PROMPT,
    loss_fn_inputs={"target_tokens": types.TensorData(data=[2, 3, 4], dtype="int64", shape=[3])},
)


def step(run: tinker.TrainingClient, steps: int = 1) -> None:
    for _ in range(steps):
        run.forward_backward([DATUM], "cross_entropy").result()
        run.optim_step(types.AdamParams()).result()


def ask(sampler: tinker.SamplingClient):
    return sampler.sample(PROMPT, 1, PARAMS)


def bound(gate: Gate, sampler: tinker.SamplingClient | str, **bounds: int | None):
    sampler_id = sampler if isinstance(sampler, str) else sampler._sampling_session_id
    with gate.http() as client:
        return client.patch(f"{OWN}/sampling_sessions/{sampler_id}", json=bounds)


def refused(client: tinker.SamplingClient) -> str:
    """The sentence of a refused sample. It must come without a repetition."""
    with pytest.raises(tinker.APIStatusError) as caught:
        ask(client).result()
    assert caught.value.status_code == 412
    assert caught.value.body["type"] == "stale_version"
    assert caught.value.body["category"] == "user"
    return str(caught.value.body["error"])


# --- Sampling sessions ----------------------------------------------------------------------


def test_a_sample_with_weights_older_than_min_version_is_refused(gate, training):
    first = training.save_weights_and_get_sampling_client().result()
    second = training.save_weights_and_get_sampling_client().result()
    assert bound(gate, first, min_version=2).json()["min_version"] == 2
    assert (
        bound(gate, second, min_version=2).json()["weight_version"].split("/v")[1][:6] == "000002"
    )
    assert ask(second).result().sequences, "it is the version itself"
    sentence = refused(first)
    assert "version 1 of" in sentence and "min_version is 2" in sentence
    assert "save newer weights" in sentence


def test_a_sample_more_steps_behind_the_trainer_than_allowed_is_refused(gate, training):
    sampler = training.save_weights_and_get_sampling_client().result()
    bound(gate, sampler, max_staleness=2)
    for behind in range(3):
        assert ask(sampler).result().sequences, behind
        step(training)
    assert "is 3 steps behind its trainer, and max_staleness is 2" in refused(sampler)
    bound(gate, sampler, max_staleness=3)
    assert ask(sampler).result().sequences


def test_the_sdk_sends_a_stale_sample_once(gate, training, monkeypatch):
    sampler = training.save_weights_and_get_sampling_client().result()
    bound(gate, sampler, min_version=9)
    sent = []
    submit = type(gate.gateway.samplers).submit

    def noted(*args, **options):
        sent.append(options["request"].operation_id)
        return submit(*args, **options)

    monkeypatch.setattr(type(gate.gateway.samplers), "submit", noted)
    refused(sampler)
    assert len(sent) == 1


def test_null_clears_a_bound_and_a_missing_field_keeps_it(gate, training):
    sampler = training.save_weights_and_get_sampling_client().result()
    assert bound(gate, sampler, min_version=9, max_staleness=1).status_code == 200
    kept = bound(gate, sampler).json()
    assert (kept["min_version"], kept["max_staleness"]) == (9, 1)
    refused(sampler)
    cleared = bound(gate, sampler, min_version=None).json()
    assert (cleared["min_version"], cleared["max_staleness"]) == (None, 1)
    assert ask(sampler).result().sequences


def test_a_sample_that_waits_is_checked_again_before_it_is_sent(gate, service):
    """The engine starts only after the trainer has gone on."""
    training = service.create_lora_training_client("tiny:full").result()
    sampler = training.save_weights_and_get_sampling_client().result()
    bound(gate, sampler, max_staleness=0)
    router = gate.gateway.samplers
    sampling = gate.run(lambda: gate.gateway.sampling._active[sampler._sampling_session_id])
    engine = gate.worker(f"sampler-{sampling.session_id}")[1]
    held = next(each for each in router.all() if sampling.session_id in each.users)
    loads = len(engine.requests)
    blocked = gate.run(lambda: hold(held))
    waiting = ask(sampler)
    wait_until(lambda: held.waiting == 1)
    step(training)
    gate.run(blocked.set)
    with pytest.raises(tinker.RequestFailedError) as caught:
        waiting.result()
    assert "stale_version: version 1 of" in str(caught.value)
    assert "1 steps behind its trainer, and max_staleness is 0" in str(caught.value)
    assert caught.value.category is types.RequestErrorCategory.User
    assert len(engine.requests) == loads, "no engine has seen it"


def hold(sampler):
    """Hold back a sampler's samples before they are sent, until the returned event is set."""
    import asyncio

    event, assigned = asyncio.Event(), sampler._assigned

    async def later(work):
        await event.wait()
        return await assigned(work)

    sampler._assigned = later
    return event
