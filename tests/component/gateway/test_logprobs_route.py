"""`POST /api/tandem/v1/logprobs` with a fake sampler, whose token logprobs it sends on."""

from __future__ import annotations

import json

import httpx
import pytest

from gateway.api.tandem.logprobs import MAX_SEQUENCES
from tandem.errors import WorkerDied
from tests.support.gateway.raw_connection import Raw
from tests.support.gateway.requests import finish, new_sampler
from tests.support.waiting import wait_until


@pytest.fixture
def sampler_id(gate):
    with gate.http() as client:
        for session in gate.run(gate.gateway.sessions.all):
            finish(client, session.id)
    return new_sampler(gate)


def score(client: httpx.Client, sequences: list[list[int]], **body):
    return client.post("/api/tandem/v1/logprobs", json={"sequences": sequences, **body})


def engine_of(gate, sampler_id: str):
    return gate.worker(f"sampler-{sampler_id.partition(':')[0]}")[1]


def started_engine(gate, client, sampler_id: str):
    assert score(client, [[1, 2]], sampling_session_id=sampler_id).is_success
    return engine_of(gate, sampler_id)


def test_the_order_is_kept_and_wrong_sequences_fail_alone(gate, sampler_id):
    sequences = [[1 + i % 60] * (1 + i % 50) for i in range(300)]
    sequences[149:152] = [[2**40, 2], [], [1] * 65]
    with gate.http() as client:
        answer = score(client, sequences, sampling_session_id=sampler_id)
    body = answer.json()
    assert answer.status_code == 200, body
    assert body["weight_version"] == "base/tiny"
    assert [each["index"] for each in body["sequences"]] == list(range(300))
    failed = {e["index"]: e["failure"]["type"] for e in body["sequences"] if e["failure"]}
    assert failed == {
        149: "token_out_of_vocabulary",
        150: "empty_batch",
        151: "sequence_too_long",
    }
    for each, tokens in zip(body["sequences"], sequences, strict=True):
        assert (each["logprobs"] is None) == (each["index"] in failed)
        if each["logprobs"]:
            assert each["logprobs"] == [None] + [-1] * (len(tokens) - 1)
    sent = engine_of(gate, sampler_id).requests
    assert len(sent) == 297
    assert len({request.operation_id for request in sent}) == 297
    assert {(r.params.max_tokens, r.prompt_logprobs) for r in sent} == {(0, True)}


def test_few_sequences_are_in_the_engine_at_a_time_and_a_client_that_leaves_ends_them(
    gate, sampler_id
):
    with gate.http() as client:
        engine = started_engine(gate, client, sampler_id)
    gate.run(engine.gate.clear)
    sampler = gate.gateway.samplers.all()[-1]
    body = json.dumps({"sequences": [[1, 2]] * 100, "sampling_session_id": sampler_id}).encode()
    with Raw(gate) as leaving:
        leaving.post(
            "/api/tandem/v1/logprobs",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        )
        leaving.send(body)
        wait_until(lambda: len(engine.requests) == 33)
        assert sampler.waiting == 32
    wait_until(lambda: len(engine.cancelled) == 32)
    assert sampler.waiting == 0 and len(engine.requests) == 33
    gate.run(engine.gate.set)


def test_a_models_name_names_the_weights_and_one_source_is_needed(gate, sampler_id):
    with gate.http() as client:
        assert score(client, [[1, 2]], model="tiny").json()["weight_version"] == "base/tiny"
        assert score(client, [[1, 2]], model="none").status_code == 404
        for source in ({}, {"model": "tiny", "sampling_session_id": sampler_id}):
            refused = score(client, [[1, 2]], **source)
            assert (refused.status_code, refused.json()["type"]) == (400, "invalid_request")
        for sequences in ([], [[1]] * (MAX_SEQUENCES + 1)):
            assert score(client, sequences, model="tiny").status_code == 400


def test_a_failure_of_the_engine_fails_the_request(gate, sampler_id):
    with gate.http() as client:
        engine = started_engine(gate, client, sampler_id)
        engine.sample_error = WorkerDied("the engine failed")
        answer = score(client, [[1, 2]] * 40, sampling_session_id=sampler_id)
        engine.sample_error = None
    assert (answer.status_code, answer.json()["type"]) == (500, "worker_died")
