"""Sampling with a fake sampler."""

from __future__ import annotations

import json
import logging
import pickle
import threading

import httpx
import numpy as np
import pytest
import tinker
from tinker import types
from tinker.lib import queue_state_logger
from tinker.lib.public_interfaces.sampling_client import SamplingClient

from gateway.api.tinker import futures
from gateway.storage.futures.completion_feed import CLIENT_BLOCK
from gateway.storage.futures.table import FutureTable
from tandem.wire.v1 import tinker_pb2
from tests.support.gateway.requests import asample, finish, new_sampler, retrieve_future
from tests.support.gateway.running import KEY, make_model, running_gateway
from tests.support.waiting import PATIENCE, wait_until

TOKENS = [1, 2, 3]
PROMPT = types.ModelInput.from_ints(TOKENS)
PARAMS = types.SamplingParams(max_tokens=3)


@pytest.fixture(autouse=True)
def _alone(gate):
    """End the sessions of earlier tests, so that this test shares no engine with them."""
    with gate.http() as client:
        for session in gate.run(gate.gateway.sessions.all):
            finish(client, session.id)


@pytest.fixture
def sampling(service):
    return service.create_sampling_client(base_model="tiny").result()


def engine_of(gate, sampler):
    """The engine of a client or of a sampling session's id."""
    sampler_id = sampler if isinstance(sampler, str) else sampler._sampling_session_id
    return gate.worker(f"sampler-{sampler_id.partition(':')[0]}")[1]


def poll(client, sampler_id: str, **changes):
    target = {"type": "sampling_session", "sampling_session_id": sampler_id}
    body = {"target": target, "prev_cursor": 0, "timeout": 0} | changes
    return client.post("/api/v1/retrieve_futures", json=body)


# --- Parameters for the engine ------------------------------------------------------------


def test_everything_that_a_client_can_ask_for_reaches_the_engine(gate, service):
    sampling = service.create_sampling_client(
        base_model="tiny", record_stability_info=True
    ).result()
    targets = np.array([[5, -1], [6, 7]])
    answer = sampling.sample(
        PROMPT,
        2,
        types.SamplingParams(
            max_tokens=9, seed=7, stop=["x", "yz"], temperature=0.5, top_k=3, top_p=0.25
        ),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=4,
        topk_sample_logprobs=5,
        target_prompt_logprobs=types.TensorData.from_numpy(targets),
        prompt_alt_tokens_k=6,
        prompt_logprobs_last_n=1,
    ).result()
    assert [s is not None for s in answer.prompt_logprobs] == [False, False, True]
    request = engine_of(gate, sampling).requests[0]
    assert list(np.frombuffer(request.prompt_tokens, "<i4")) == TOKENS
    params = request.params
    assert (params.max_tokens, params.seed, list(params.stop_strings)) == (9, 7, ["x", "yz"])
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 3, 0.25)
    assert (request.num_samples, request.prompt_logprobs) == (2, True)
    assert (request.topk_prompt_logprobs, request.topk_sample_logprobs) == (4, 5)
    assert (request.prompt_alt_tokens_k, request.prompt_logprobs_last_n) == (6, 1)
    tensor = tinker_pb2.Tensor.FromString(request.target_prompt_tokens)
    assert (tensor.dtype, list(tensor.shape)) == (tinker_pb2.DTYPE_INT64, [2, 2])
    assert np.array_equal(np.frombuffer(tensor.dense, "<i8").reshape(2, 2), targets)


def test_parameters_beyond_the_sdk_reach_the_engine_within_their_bounds(gate):
    beyond = {"min_p": 0.125, "presence_penalty": -2, "frequency_penalty": 1.5}
    with gate.http() as client:
        sampler_id = new_sampler(gate)
        params = {"max_tokens": 2, **beyond}
        accepted = asample(client, sampler_id, sampling_params=params)
        gate.retrieve(accepted.json()["request_id"])
        for name, value in (("min_p", 1.5), ("presence_penalty", 2.5), ("frequency_penalty", -3)):
            refused = asample(client, sampler_id, 1, sampling_params={"max_tokens": 2, name: value})
            assert refused.status_code == 400 and name in refused.json()["error"]
    sent = engine_of(gate, sampler_id).requests[-1].params
    assert {name: getattr(sent, name) for name in beyond} == beyond


def test_sparse_targets_keep_their_layout(gate):
    sampler_id = new_sampler(gate)
    tensor = {
        "data": [9],
        "dtype": "int64",
        "shape": [2, 4],
        "sparse_crow_indices": [0, 0, 1],
        "sparse_col_indices": [3],
    }
    with gate.http() as client:
        answer = asample(client, sampler_id, target_prompt_logprobs=tensor)
        gate.retrieve(answer.json()["request_id"])
    request = engine_of(gate, sampler_id).requests[0]
    sparse = tinker_pb2.Tensor.FromString(request.target_prompt_tokens).sparse_csr
    parts = (sparse.values, sparse.crow_indices, sparse.col_indices)
    assert [np.frombuffer(p, "<i8").tolist() for p in parts] == [[9], [0, 0, 1], [3]]


@pytest.mark.parametrize(
    ("stop", "given", "strings", "tokens"),
    [(None, False, [], []), ([], True, [], []), ("a", True, ["a"], []), ([4, 5], True, [], [4, 5])],
)
def test_an_empty_stop_is_not_an_absent_one(gate, sampling, stop, given, strings, tokens):
    sampling.sample(PROMPT, 1, types.SamplingParams(max_tokens=1, stop=stop)).result()
    params = engine_of(gate, sampling).requests[0].params
    assert params.stop_given is given
    assert (list(params.stop_strings), list(params.stop_token_ids)) == (strings, tokens)


def test_a_sample_needs_a_place_or_a_model(gate):
    sampler_id = new_sampler(gate)
    with gate.http() as client:
        for answer in (
            asample(client, sampler_id, None),
            asample(client, None, None),
            asample(client, None, None, base_model="tiny", model_path="tinker://x/y/z"),
        ):
            assert (answer.status_code, answer.json()["type"]) == (400, "invalid_request")


def test_a_sample_of_the_oldest_form_names_a_model_alone(gate):
    with gate.http() as client:
        promises = [asample(client, None, None, base_model="tiny").json() for _ in range(2)]
        assert len({p["request_id"] for p in promises}) == 2
        assert len({p["request_id"].rpartition(":")[0] for p in promises}) == 1
        for promised in promises:
            assert len(promised["sample_sequence_ids"]) == 1
            answer = gate.retrieve(promised["request_id"])
            assert tinker_pb2.SampleResponse.FromString(answer.content).sequences
        unknown = asample(client, None, None, base_model="huge")
        assert (unknown.status_code, unknown.json()["type"]) == (404, "unknown_model")


def test_a_model_can_be_asked_for_by_its_registered_path(gate, service):
    path = gate.gateway.models.get("tiny").path
    sampling = service.create_sampling_client(base_model=path).result()
    assert sampling.sample(PROMPT, 1, PARAMS).result().sequences
    assert sampling.get_base_model() == path, "from where the SDK loads the tokenizer"
    assert engine_of(gate, sampling).requests[0].version.name == "base/tiny"
    training = service.create_lora_training_client(f"{path}:full").result()
    assert training.get_info().model_name == "tiny"


# --- Clients that are copied --------------------------------------------------------------


def test_copies_of_a_client_get_numbers_of_their_own_in_any_order(gate, sampling, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    copies = [pickle.loads(pickle.dumps(sampling)) for _ in range(2)]
    copies.append(SamplingClient.from_sampler_handle(sampling.get_sampler_handle()))
    for client in (copies[1], sampling, copies[2], copies[0], copies[1]):
        assert client.sample(PROMPT, 1, PARAMS).result().sequences
    seq_ids = [r.seq_id for r in engine_of(gate, sampling).requests]
    assert seq_ids == [
        1 * CLIENT_BLOCK,
        0,
        2 * CLIENT_BLOCK,
        3 * CLIENT_BLOCK,
        1 * CLIENT_BLOCK + 1,
    ]


def test_numbers_of_clients_are_not_given_again_after_a_restart(tmp_path):
    numbers = []
    for _ in range(2):
        with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as client:
            sampler_id = sampler_id if numbers else new_sampler(gate)  # noqa: F821
            body = {"sampling_session_id": sampler_id}
            for _ in range(2):
                joined = client.post("/api/v1/join_sampling_session", json=body)
                numbers.append(joined.json()["client_counter"])
    assert numbers == [1, 2, 3, 4]


def test_nobody_joins_a_sampling_session_that_is_not_there(gate):
    with gate.http() as client:
        body = {"sampling_session_id": "s-none:sample:0"}
        assert client.post("/api/v1/join_sampling_session", json=body).status_code == 404


# --- Cancellation -------------------------------------------------------------------------


def test_a_sample_that_its_client_gives_up_leaves_the_engine_at_once(gate, sampling):
    first = sampling.sample(PROMPT, 1, PARAMS).result()
    assert first.sequences
    engine = engine_of(gate, sampling)
    gate.run(engine.gate.clear)
    sampler = gate.gateway.samplers.all()[-1]
    given_up, kept = (sampling.sample(PROMPT, 1, PARAMS) for _ in range(2))
    wait_until(lambda: len(engine.requests) == 3)
    assert given_up.future().cancel()
    wait_until(lambda: engine.cancelled)
    wait_until(lambda: sampler.waiting == 1)
    assert engine.cancelled == [1]
    gate.run(engine.gate.set)
    assert kept.result().sequences


def test_cancelling_twice_or_too_late_does_no_harm(gate):
    sampler_id = new_sampler(gate)
    engine = engine_of(gate, sampler_id)
    with gate.http() as client:

        def cancel(request_id: str):
            return client.post("/api/v1/cancel_future", json={"request_id": request_id})

        ended = asample(client, sampler_id, 0).json()["request_id"]
        result = gate.retrieve(ended).content
        assert cancel(ended).status_code == 204
        assert gate.retrieve(ended).content == result
        gate.run(engine.gate.clear)
        running = asample(client, sampler_id, 1).json()["request_id"]
        assert [cancel(running).status_code for _ in range(2)] == [204, 204]
        gate.run(engine.gate.set)
        answer = gate.retrieve(running).json()
        assert (answer["type"], answer["category"]) == ("sample_cancelled", "user")
        assert cancel(f"{sampler_id}:77").status_code == 204
        run_id = gate.run_id(gate.session_id())
        refused = cancel(f"{run_id}:1")
        assert (refused.status_code, refused.json()["type"]) == (400, "invalid_request")


# --- Bounds -------------------------------------------------------------------------------


def test_a_client_with_more_samples_than_may_wait_backs_off_and_finishes(tmp_path):
    with (
        running_gateway(tmp_path, session_ttl=600, max_waiting_samples=4) as gate,
        gate.service() as service,
    ):
        sampling = service.create_sampling_client(base_model="tiny").result()
        _, engine = gate.worker("sampler")
        gate.run(engine.gate.clear)
        futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(12)]
        with gate.http() as client:
            refused = 'requests_total{route="asample",status="429"}'
            wait_until(lambda: refused in client.get("/metrics").text)
        gate.run(engine.gate.set)
        assert all(future.result().sequences for future in futures)
        assert sorted(r.seq_id for r in engine.requests) == list(range(12))


def test_the_bound_on_all_samplers_together_says_when_to_come_back(tmp_path):
    with (
        running_gateway(tmp_path, session_ttl=600, limit={"waiting_samples_in_all": 2}) as gate,
        gate.http() as client,
    ):
        samplers = [new_sampler(gate) for _ in range(3)]
        gate.start_engines()
        engines = list(gate.launcher.servicers.values())
        for engine in engines:
            gate.run(engine.gate.clear)
        assert [asample(client, s).status_code for s in samplers] == [200, 200, 429]
        refused = asample(client, samplers[2])
        assert refused.headers["Retry-After"] == "1"
        assert refused.json()["type"] == "overloaded"
        for engine in engines:
            gate.run(engine.gate.set)
        wait_until(lambda: asample(client, samplers[2]).status_code == 200)


# --- Engines ------------------------------------------------------------------------------

ONE_GROUP = {"name": "one", "devices": ["cpu:0"], "roles": ["trainer", "sampler"], "awake": 0}


def test_an_engine_beyond_the_bound_waits_tells_why_and_gets_the_place_of_an_idle_one(tmp_path):
    bounds = {
        "groups": [ONE_GROUP | {"workers": 2}],
        "engine_quantum": 0,
        "sharing": {"lora_runs": "never"},  # each session has an engine
    }
    with running_gateway(tmp_path, session_ttl=600, **bounds) as gate, gate.http() as client:
        samplers = [new_sampler(gate) for _ in range(3)]
        gate.run(gate.launcher.start_gate.clear)
        requests = [asample(client, s).json()["request_id"] for s in samplers]

        def states() -> list[str]:
            return [s["state"] for s in client.get("/api/tandem/v1/status").json()["samplers"]]

        wait_until(lambda: states() == ["starting", "starting", "queued"])
        waiting = client.post("/api/v1/retrieve_future", json={"request_id": requests[2]}).json()
        assert waiting["queue_state"] == "paused_capacity"
        assert "2 workers are there (TANDEM_GROUPS workers)" in waiting["queue_state_reason"]
        assert "1st in the queue for a place on group one" in waiting["queue_state_reason"]
        assert len(gate.launcher.specs) == 2
        gate.run(gate.launcher.start_gate.set)
        assert all(gate.retrieve(request).is_success for request in requests)
        assert len(gate.launcher.stopped) == 1, "that of an engine with nothing to do"
        again = [asample(client, s, 1).json()["request_id"] for s in samplers]
        assert all(gate.retrieve(request).is_success for request in again)
        assert len(gate.gateway.processes.list_records()) <= 2


def test_a_save_whose_engine_waits_for_its_place_tells_so(tmp_path):
    with (
        running_gateway(tmp_path, session_ttl=600, groups=[ONE_GROUP | {"workers": 2}]) as gate,
        gate.http() as client,
    ):
        new_sampler(gate)
        gate.start_engines()
        run_id = gate.run_id(gate.session_id(), sampler="none")
        save = {"model_id": run_id, "seq_id": 1, "sampling_session_seq_id": 0}
        request = client.post("/api/v1/save_weights_for_sampler", json=save).json()["request_id"]

        def reason() -> str:
            answer = client.post("/api/v1/retrieve_future", json={"request_id": request})
            assert answer.status_code == 408
            return answer.json()["queue_state_reason"]

        wait_until(lambda: "the sampler waits for its place" in reason())
        assert "1st in the queue for a place on group one: 2 workers are there" in reason()


def test_a_save_that_the_sdk_repeats_with_another_session_number_is_the_first_one(gate):
    run_id = gate.run_id(gate.session_id())
    save = {"model_id": run_id, "seq_id": 1, "sampling_session_seq_id": 4}
    with gate.http() as client:

        def ask(**other: object) -> httpx.Response:
            return client.post("/api/v1/save_weights_for_sampler", json=save | other)

        first = ask().json()["request_id"]
        assert ask(sampling_session_seq_id=5).json()["request_id"] == first
        session = gate.retrieve(first).json()["sampling_session_id"]
        assert ask(sampling_session_seq_id=6).json()["request_id"] == first
        assert gate.retrieve(first).json()["sampling_session_id"] == session
        for other in ({"kind": "inflight"}, {"sampling_session_seq_id": None, "path": "named"}):
            refused = ask(**other)
            assert refused.status_code == 400 and "is already another request" in refused.text


# --- Waiting for results ------------------------------------------------------------------


def test_a_long_poll_tells_place_and_age_and_a_pause_its_reason(gate):
    gate.run(gate.launcher.start_gate.clear)
    sampler_id, asked = new_sampler(gate), len(gate.launcher.specs)
    with gate.http() as client:
        ids = [asample(client, sampler_id, seq).json()["request_id"] for seq in range(3)]
        wait_until(lambda: len(gate.launcher.specs) > asked)

        def waiting(index: int) -> tuple[str, str]:
            body = {"request_id": ids[index]}
            answer = client.post("/api/v1/retrieve_future", json=body)
            assert (answer.status_code, answer.json()["type"]) == (408, "try_again")
            return answer.json()["queue_state"], answer.json()["queue_state_reason"]

        state, reason = waiting(2)
        assert state == "paused_capacity"
        assert reason.startswith("the sampler is starting (")
        gate.launcher.waits_for = "its pod is not scheduled: 2 Insufficient memory"
        assert "s): its pod is not scheduled: 2 Insufficient memory; 2 samples" in waiting(2)[1]
        assert "; 2 samples before this one, which has waited " in reason
        held = len(gate.launcher.servicers)
        gate.run(gate.launcher.start_gate.set)
        wait_until(lambda: len(gate.launcher.servicers) > held)
        engine = engine_of(gate, sampler_id)
        gate.run(engine.gate.clear)
        more = asample(client, sampler_id, 3).json()["request_id"]
        ids.append(more)
        wait_until(lambda: any(r.seq_id == 3 for r in engine.requests))
        state, reason = waiting(3)
        assert state == "active"
        assert reason.startswith("the sampler is at work; ")
        gate.run(engine.gate.set)
        assert all(gate.retrieve(i).is_success for i in ids)


def test_long_polls_that_begin_together_end_apart(gate, monkeypatch):
    timeouts = []

    async def wait(_futures, _future, *, timeout: float) -> None:
        timeouts.append(timeout)

    with gate.http() as client:
        request_id = asample(client, new_sampler(gate)).json()["request_id"]
        gate.retrieve(request_id)
        monkeypatch.setattr(FutureTable, "wait_for_news", wait)
        for _ in range(20):
            assert retrieve_future(client, request_id).status_code == 408
    assert len(set(timeouts)) == 20
    assert all(2 / 3 <= each / futures.LONG_POLL <= 1 for each in timeouts)


def test_the_sdk_tells_its_user_soon_why_it_waits(tmp_path, caplog, monkeypatch):
    """No long poll ends within this test, so only early answers have a reason. The SDK prints why
    samples wait at once. It keeps the reasons of runs to itself for 15 minutes."""
    monkeypatch.setattr(queue_state_logger, "PAUSE_GRACE_PERIOD", 0)
    settings = {"session_ttl": 600, "long_poll": 10 * PATIENCE}
    with running_gateway(tmp_path, **settings) as gate, gate.service() as service:
        gate.run(gate.launcher.start_gate.clear)
        with caplog.at_level(logging.WARNING, logger="tinker"):
            creation = service.create_lora_training_client("tiny:full")
            wait_until(lambda: "the trainer is starting (" in caplog.text)
            assert "s): its process starts" in caplog.text
            sampling = service.create_sampling_client(base_model="tiny").result()
            future = sampling.sample(PROMPT, 1, PARAMS)
            wait_until(lambda: "Reason: the sampler is starting (" in caplog.text)
        gate.run(gate.launcher.start_gate.set)
        assert future.result().sequences and creation.result().model_id


def test_a_pause_is_told_early_once_for_each_of_its_phases(tmp_path):
    with (
        running_gateway(tmp_path, session_ttl=600, long_poll=10 * PATIENCE) as gate,
        gate.http() as client,
    ):
        gate.run(gate.launcher.start_gate.clear)
        request_id = asample(client, new_sampler(gate), 0).json()["request_id"]
        reasons: list[str] = []

        def ask() -> None:
            while True:
                answer = client.post("/api/v1/retrieve_future", json={"request_id": request_id})
                if answer.status_code == 200:
                    return reasons.append("a result")
                reasons.append(answer.json()["queue_state_reason"])

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        wait_until(lambda: len(reasons) == 1)
        gate.launcher.waits_for = "its pod is not scheduled: 2 Insufficient memory"
        wait_until(lambda: len(reasons) == 2)
        gate.run(gate.launcher.start_gate.set)
        asking.join(PATIENCE)
        assert [reason.partition("): ")[2].partition(";")[0] for reason in reasons[:2]] == [
            "its process starts",
            "its pod is not scheduled: 2 Insufficient memory",
        ]
        assert reasons[2:] == ["a result"]


def test_a_large_result_is_announced_by_its_size_first(gate, sampling):
    sampling.sample(PROMPT, 1, PARAMS).result()  # starts the engine
    engine_of(gate, sampling).speak = lambda _prompt: list(range(1000)) * 160
    answer = sampling.sample(PROMPT, 1, PARAMS).result()
    assert list(answer.sequences[0].tokens[:2]) == [0, 1]
    request_id = f"{sampling._sampling_session_id}:1"
    with gate.http() as client:
        ask = {"request_id": request_id, "allow_metadata_only": True}
        announced = client.post("/api/v1/retrieve_future", json=ask).json()
        whole = client.post("/api/v1/retrieve_future", json={"request_id": request_id})
        assert announced["status"] == "complete_metadata"
        assert announced["response_payload_size"] == len(whole.content) > 2**20
        engine_of(gate, sampling).speak = lambda prompt: prompt
        small = asample(client, sampling._sampling_session_id, 2).json()["request_id"]
        gate.retrieve(small)
        at_once = client.post("/api/v1/retrieve_future", json=ask | {"request_id": small})
        assert at_once.headers["content-type"] == "application/x-protobuf"


def test_one_poll_reports_each_end_once_with_its_size(gate):
    sampler_id = new_sampler(gate)
    with gate.http() as client:
        first = asample(client, sampler_id, 0).json()["request_id"]
        size = len(gate.retrieve(first).content)
        before = poll(client, sampler_id, timeout=10).json()
        assert before["completions"] == [
            {"state": "finished", "request_id": first, "response_payload_uncompressed_size": size}
        ]
        # The client asks again for a lost answer.
        assert poll(client, sampler_id, timeout=10).json() == before
        second = asample(client, sampler_id, 1).json()["request_id"]
        asample(client, sampler_id, CLIENT_BLOCK)
        after = poll(client, sampler_id, prev_cursor=before["cursor"], timeout=10).json()
        assert [done["request_id"] for done in after["completions"]] == [second]
        nothing = poll(client, sampler_id, prev_cursor=after["cursor"]).json()
        assert nothing == {"completions": [], "cursor": after["cursor"]}


def test_a_failed_sample_is_reported_as_such_and_a_fetched_one_is_forgotten(gate):
    sampler_id = new_sampler(gate)
    engine = engine_of(gate, sampler_id)
    with gate.http() as client:
        done = asample(client, sampler_id, 0).json()["request_id"]
        gate.retrieve(done)
        gate.run(engine.gate.clear)
        failed = asample(client, sampler_id, 1).json()["request_id"]
        cursor = poll(client, sampler_id, timeout=10).json()["cursor"]
        client.post("/api/v1/cancel_future", json={"request_id": failed})
        gate.run(engine.gate.set)
        answer = poll(
            client, sampler_id, prev_cursor=cursor, timeout=10, retrieved_request_ids=[done]
        )
        assert answer.json()["completions"] == [{"state": "failed", "request_id": failed}]
        assert gate.gateway.futures.get(done) is None
        assert gate.retrieve(failed).json()["type"] == "sample_cancelled"


def test_a_cursor_of_an_earlier_gateway_and_an_unknown_session_are_refused(gate):
    sampler_id = new_sampler(gate)
    with gate.http() as client:
        assert poll(client, sampler_id, prev_cursor=17).status_code == 410
        assert poll(client, "s-none:sample:0").status_code == 404


def test_the_sdk_finishes_with_one_poll_for_all_its_samples(gate, service):
    service.holder._client_config = service.holder.get_client_config().model_copy(
        update={"sample_use_retrieve_futures": True}
    )
    sampling = service.create_sampling_client(base_model="tiny").result()
    futures = [
        sampling.sample(types.ModelInput.from_ints([n, n + 1]), 1, PARAMS) for n in range(40)
    ]
    for n, future in enumerate(futures):
        assert list(future.result().sequences[0].tokens) == [n + 1, n]
    with gate.http() as client:
        assert 'route="retrieve_futures",status="200"' in client.get("/metrics").text


# --- Requests that cannot succeed ----------------------------------------------------------


def refused(client, **changes) -> str:
    """The immediate error for a sample of `tiny` (context: 64 tokens)."""
    answer = client.post("/api/v1/asample", json={**SAMPLE, **changes})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


SAMPLE = {"base_model": "tiny", "prompt": {"chunks": [{"tokens": [5] * 60}]}, "num_samples": 1}


def test_a_prompt_that_does_not_fit_is_refused_at_once(gate, sampling):
    long = types.ModelInput.from_ints([5] * 60)
    with pytest.raises(
        tinker.BadRequestError,
        match=r"Prompt length plus max_tokens exceeds the model's context window: "
        r"60 prompt tokens \+ 5 max_tokens > 64\.",
    ):
        sampling.sample(long, 1, types.SamplingParams(max_tokens=5)).result()
    with pytest.raises(tinker.BadRequestError, match=r"65 prompt tokens \+ 1 max_tokens > 64"):
        sampling.compute_logprobs(types.ModelInput.from_ints([5] * 65)).result()
    with gate.http() as client:
        params = {"max_tokens": 32000}
        assert "60 prompt tokens + 32000 max_tokens > 64" in refused(client, sampling_params=params)
        full = {"prompt": {"chunks": [{"tokens": [5] * 64}]}, "sampling_params": {}}
        assert "64 prompt tokens + 1 max_tokens > 64" in refused(client, **full)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"prompt": {"chunks": [{"tokens": [5, 99]}]}}, "token 99 of the prompt is outside"),
        ({"prompt": {"chunks": [{"tokens": [5, -1]}]}}, "token -1 of the prompt is outside"),
        ({"sampling_params": {"stop": [99]}}, "stop token 99 is outside the vocabulary of 90"),
        ({"sampling_params": {"stop": ["a", ""]}}, "a stop string is empty"),
        ({"topk_sample_logprobs": 91}, "topk_sample_logprobs is 91; 0 to 90"),
        ({"topk_prompt_logprobs": 91}, "topk_prompt_logprobs is 91; 0 to 90"),
        ({"num_samples": 0}, "num_samples"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens is 0"),
    ],
)
def test_a_request_outside_the_model_is_refused_at_once(gate, tmp_path, changes, why):
    folder = make_model(tmp_path / "counted")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 90}))
    gate.run(gate.gateway.models.add(name="counted", path=str(folder)))
    with gate.http() as client:
        params = {"sampling_params": {"max_tokens": 2}}
        assert why in refused(client, **{**params, "base_model": "counted", **changes})


def test_a_prompt_that_fills_the_context_is_scored(gate, sampling):
    full = types.ModelInput.from_ints([5] * 64)
    assert len(sampling.compute_logprobs(full).result()) == 64
    params = types.SamplingParams(max_tokens=0)
    answer = sampling.sample(full, 2, params, include_prompt_logprobs=True).result()
    assert [list(sequence.tokens) for sequence in answer.sequences] == [[], []]
    assert len(answer.prompt_logprobs) == 64


def test_a_repeated_request_that_was_accepted_is_not_refused_later(gate, sampling):
    sampling.sample(PROMPT, 1, PARAMS).result()
    with gate.http() as client:
        first = asample(client, sampling._sampling_session_id, 7).json()
        gate.retrieve(first["request_id"])
        gate.gateway.models.note_longest("tiny", 2)
        try:
            assert asample(client, sampling._sampling_session_id, 7).json() == first
            assert asample(client, sampling._sampling_session_id, 8).status_code == 400
        finally:
            gate.gateway.models.note_longest("tiny", 64)


def test_clients_hear_how_long_a_sequence_of_their_engine_may_be(gate, sampling):
    def known() -> list[int | None]:
        with gate.http() as client:
            models = client.get("/api/v1/get_server_capabilities").json()["supported_models"]
        return [model["max_context_length"] for model in models if model["model_name"] == "tiny"]

    sampling.sample(PROMPT, 1, PARAMS).result()
    (before,) = known()
    assert before is not None
    engine_of(gate, sampling).max_length = before - 8
    sampling.sample(PROMPT, 1, PARAMS).result()
    assert known() == [before - 8]


def test_a_length_that_a_config_names_by_another_word_is_known(gate, tmp_path):
    """GPT-2's config calls it n_positions."""
    folder = make_model(tmp_path / "gpt2")
    config = {"architectures": ["GPT2LMHeadModel"], "n_positions": 32, "vocab_size": 90}
    (folder / "config.json").write_text(json.dumps(config))
    gate.run(gate.gateway.models.add(name="gpt2", path=str(folder)))
    with gate.http() as client:
        sentence = refused(client, base_model="gpt2", sampling_params={"max_tokens": 1})
        assert "60 prompt tokens + 1 max_tokens > 32" in sentence
