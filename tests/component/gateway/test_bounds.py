"""Bounds on the weights of samples: `min_version` and `max_staleness`.

A version has the number of its save among the run's operations."""

from __future__ import annotations

import asyncio

import openai
import pytest
import tinker
from tinker import types

from tandem.v1 import sampler_pb2
from tests.support.gateway.access_world import Call
from tests.support.gateway.requests import asample
from tests.support.gateway.running import Gate
from tests.support.gateway.runs import SELDOM
from tests.support.gateway.speaking_models import (
    async_client_of,
    client_of,
    complete,
    says,
    speaking_gateway,
)
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


@pytest.mark.parametrize(
    ("updates", "in_flight", "sent"),
    [
        (None, False, "DEFAULT"),
        ("wait", False, "DEFAULT"),
        ("keep", True, "KEEP"),
        ("abort", True, "ABORT"),
    ],
)
def test_samples_are_sent_with_the_chosen_updates(
    gate, training, monkeypatch, updates, in_flight, sent
):
    sampler = training.save_weights_and_get_sampling_client().result()
    assert bound(gate, sampler, updates=updates).json()["updates"] == updates
    requests = []
    submit = type(gate.gateway.samplers).submit

    def noted(*args, **options):
        requests.append(options["request"])
        return submit(*args, **options)

    monkeypatch.setattr(type(gate.gateway.samplers), "submit", noted)
    assert ask(sampler).result().sequences
    (request,) = requests
    assert (request.in_flight, sampler_pb2.Updates.Name(request.updates)) == (
        in_flight,
        f"UPDATES_{sent}",
    )


def hold(sampler) -> asyncio.Event:
    """Hold back a sampler's samples before they are sent, until the returned event is set."""
    event, assigned = asyncio.Event(), sampler.calls.assigned

    async def later(work):
        if work.samples:  # a load goes on
            await event.wait()
        return await assigned(work)

    sampler.calls.assigned = later
    return event


def sampler_of(gate: Gate, session_id: str):
    return next(each for each in gate.gateway.samplers.all() if session_id in each.users)


def test_a_sample_that_waits_is_checked_again_before_it_is_sent(gate, training):
    sampler = training.save_weights_and_get_sampling_client().result()
    bound(gate, sampler, max_staleness=0)
    session_id = training.model_id.partition(":")[0]
    held, engine = sampler_of(gate, session_id), gate.worker(f"sampler-{session_id}")[1]
    sent = len(engine.requests)
    goes_on = gate.run(lambda: hold(held))
    waiting = ask(sampler)
    wait_until(lambda: held.waiting == 1)
    step(training)
    gate.run(goes_on.set)
    with pytest.raises(tinker.RequestFailedError) as caught:
        waiting.result()
    assert "stale_version: version 1 of" in str(caught.value)
    assert "1 steps behind its trainer, and max_staleness is 0" in str(caught.value)
    assert caught.value.category is types.RequestErrorCategory.User
    assert len(engine.requests) == sent, "no engine has seen it"


def test_an_in_flight_sample_that_waits_is_checked_with_the_version_that_would_serve(
    gate, training
):
    sampler = training.save_weights_and_get_sampling_client(kind="inflight").result()
    bound(gate, sampler, max_staleness=0)
    held = sampler_of(gate, training.model_id.partition(":")[0])
    goes_on = gate.run(lambda: hold(held))
    waiting = ask(sampler)
    wait_until(lambda: held.waiting == 1)
    step(training)
    training.save_weights_and_get_sampling_client(kind="inflight").result()
    gate.run(goes_on.set)
    assert waiting.result().sequences, "the version of step 1 answers, not that of step 0"
    step(training)
    refused(sampler)


@pytest.mark.parametrize("bounds", [{"min_version": 0}, {"max_staleness": 5}])
def test_a_base_model_cannot_be_bounded(gate, service, bounds):
    sampler = service.create_sampling_client(base_model="tiny").result()
    answer = bound(gate, sampler, **bounds)
    assert (answer.status_code, answer.json()["type"]) == (400, "invalid_request")
    assert "a base model has one version" in answer.json()["error"]
    assert ask(sampler).result().sequences
    with gate.http() as client:
        answer = asample(client, sampler._sampling_session_id, 77, **bounds)
    assert (answer.status_code, answer.json()["type"]) == (400, "invalid_request")


@pytest.mark.parametrize("bounds", [{"min_version": -1}, {"max_staleness": "many"}])
def test_a_bound_is_a_number_from_0(gate, training, bounds):
    sampler = training.save_weights_and_get_sampling_client().result()
    answer = bound(gate, sampler, **bounds)
    assert (answer.status_code, answer.json()["type"]) == (400, "invalid_request")


def test_published_weights_of_another_owner_cannot_be_bounded(world):
    own = tinker.RestClient(base_url=world.gate.url, api_key=world.keys["member"])
    own.publish_checkpoint_from_tinker_path(world.weights).result()
    ben = tinker.ServiceClient(base_url=world.gate.url, api_key=world.keys["foreign"])
    sampler_id = ben.create_sampling_client(model_path=world.weights).result()._sampling_session_id
    for bounds in ({"min_version": 1}, {"max_staleness": 100}):
        call = Call(f"{OWN}/sampling_sessions/{sampler_id}", bounds)
        answer = world.ask("PATCH", call, key=world.keys["foreign"])
        assert (answer.status_code, answer.json()["type"]) == (400, "invalid_request")
        assert "another owner's" in answer.json()["error"]
    stranger = world.ask("PATCH", call, key=world.keys["member"])
    assert (stranger.status_code, stranger.json()["type"]) == (404, "unknown_sampler")


def test_staleness_needs_a_trainer(gate, service):
    training = service.create_lora_training_client("tiny:full").result()
    sampler = training.save_weights_and_get_sampling_client().result()
    bound(gate, sampler, max_staleness=1)
    with gate.http() as client:
        where = f"{OWN}/runs/{training.model_id}/stop"
        assert client.post(where, json={"discard": True}).is_success
    run = gate.gateway.runs.get(training.model_id)
    wait_until(lambda: run is None or run.error is not None)
    with pytest.raises(tinker.BadRequestError, match="that run has ended"):
        ask(sampler).result()
    bound(gate, sampler, max_staleness=None, min_version=1)
    assert ask(sampler).result().sequences


def test_a_request_may_have_bounds_of_its_own_beside_its_sessions(gate, training):
    sampler = training.save_weights_and_get_sampling_client().result()
    sampler_id = sampler._sampling_session_id
    step(training)
    bound(gate, sampler, max_staleness=1)
    with gate.http() as client:
        for seq_id, (bounds, status) in enumerate(
            [
                ({}, 200),
                ({"min_version": 1}, 200),
                ({"min_version": 2}, 412),
                ({"max_staleness": 1}, 200),
                ({"max_staleness": 0}, 412),
            ]
        ):
            answer = asample(client, sampler_id, 100 + seq_id, **bounds)
            assert answer.status_code == status, bounds
        step(training)
        answer = asample(client, sampler_id, 200, max_staleness=2)
        assert answer.status_code == 412, "the session's bound holds, too"


def test_bounds_outlive_a_restart_of_the_gateway_also_before_the_trainer_is_back(start):
    """The trainer has no snapshot, so its step follows from the recorded steps."""
    with start(recovery=SELDOM) as gate:
        training = gate.service().create_lora_training_client("tiny:full").result()
        sampler_id = training.save_weights_and_get_sampling_client().result()._sampling_session_id
        bound(gate, sampler_id, min_version=1, max_staleness=1)
        step(training, steps=2)
    with start(recovery=SELDOM) as gate, gate.http() as client:
        kept = bound(gate, sampler_id).json()
        assert (kept["min_version"], kept["max_staleness"]) == (1, 1)
        answer = asample(client, sampler_id)
        assert (answer.status_code, answer.json()["type"]) == (412, "stale_version")
        assert "is 2 steps behind its trainer" in answer.json()["error"]


# --- /v1 ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    with speaking_gateway(tmp_path_factory.mktemp("openai"), session_ttl=600) as gate:
        yield gate


@pytest.fixture(scope="module")
def speaker(speaking):
    """A run whose newest weights are version 4 of step 1. Its trainer is at step 2."""
    with speaking.service() as service:
        run = service.create_lora_training_client("speaker:full").result()
        run.save_weights_and_get_sampling_client().result()
        step(run)
        run.save_weights_and_get_sampling_client().result()
        step(run)
        yield run


@pytest.mark.parametrize(
    "bounds", [{"min_version": 4}, {"max_staleness": 1}, {"min_version": 1, "max_staleness": 5}]
)
def test_v1_answers_within_the_bounds_of_its_request(speaking, speaker, bounds):
    client = client_of(speaking)
    complete(client, model=speaker.model_id)
    says(speaking, "ok")
    answer = complete(client, model=speaker.model_id, extra_body=bounds)
    assert answer.choices[0].text == "ok"
    assert "/v000004-" in answer.tandem_weight_version


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("bounds", [{"min_version": 5}, {"max_staleness": 0}])
def test_v1_refuses_a_stale_version_before_the_first_token(speaking, speaker, bounds, stream):
    client = client_of(speaking)
    for ask_one in (
        lambda: complete(client, model=speaker.model_id, stream=stream, extra_body=bounds),
        lambda: client.chat.completions.create(
            model=speaker.model_id,
            messages=[{"role": "user", "content": "hi"}],
            stream=stream,
            extra_body=bounds,
        ),
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            ask_one()
        assert caught.value.status_code == 412
        assert caught.value.body["code"] == "stale_version"
        assert caught.value.body["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_v1_checks_a_request_again_before_it_is_sent(speaking, speaker, stream):
    client = client_of(speaking)
    complete(client, model=speaker.model_id)
    held = speaking.gateway.samplers.all()[-1]
    assigned = held.calls.assigned
    goes_on = speaking.run(lambda: hold(held))
    async with async_client_of(speaking) as client:
        run = speaking.gateway.runs.get(speaker.model_id)
        asked = asyncio.create_task(
            client.completions.create(
                model=speaker.model_id,
                prompt="x",
                stream=stream,
                extra_body={"max_staleness": run.step - 1},
            )
        )
        await asyncio.to_thread(wait_until, lambda: held.waiting == 1)
        await asyncio.to_thread(step, speaker)
        speaking.run(goes_on.set)
        with pytest.raises(openai.APIStatusError) as caught:
            await asked
    held.calls.assigned = assigned
    assert (caught.value.status_code, caught.value.body["code"]) == (412, "stale_version")


@pytest.mark.parametrize("stream", [False, True])
def test_v1_answers_in_flight_with_the_versions_of_the_tokens(speaking, speaker, stream):
    client = client_of(speaking)
    complete(client, model=speaker.model_id)
    engine = says(speaking, "ok", end=False)
    body = {"in_flight": True, "return_token_ids": True}
    answer = complete(client, model=speaker.model_id, stream=stream, extra_body=body)
    assert engine.requests[-1].in_flight
    assert engine.requests[-1].version.run_id == speaker.model_id
    if stream:
        assert {part.tandem_weight_version for part in answer} == {engine.requests[-1].version.name}
        return
    tokens = len(answer.choices[0].token_ids)
    run = {"version": answer.tandem_weight_version, "step": 1, "tokens": tokens}
    assert answer.choices[0].tandem_versions == [run]
    complete(client, model=speaker.model_id)
    assert not engine.requests[-1].in_flight


def test_v1_continues_only_a_runs_newest_weights_in_flight(speaking):
    with pytest.raises(openai.BadRequestError, match="in_flight needs a run's id") as caught:
        complete(client_of(speaking), extra_body={"in_flight": True})
    assert caught.value.body["param"] == "in_flight"


def test_v1_bounds_no_base_model(speaking):
    with pytest.raises(openai.BadRequestError, match="a base model has one version"):
        complete(client_of(speaking), extra_body={"min_version": 1})
