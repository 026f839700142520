"""Limits of owners, and bounds of queues and memory."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import tinker
from tinker import types

from gateway.owners.auth.keys import NewKey
from gateway.owners.limits import BOUNDS, Ledger, Rate, retry_after
from tandem.errors import Overloaded
from tests.support.custom_losses import request_body, traced
from tests.support.files import tree
from tests.support.gateway.requests import asample, create_sampler, finish, optim_step
from tests.support.gateway.running import forward_backward_bytes, make_model, running_gateway
from tests.support.sdk import supervised
from tests.support.waiting import wait_until

PROTO = {"Content-Type": "application/x-protobuf"}
PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=3)
LONG = {"chunks": [{"type": "encoded_text", "tokens": list(range(2000))}]}


def key_of(gate, owner: str) -> str:
    _key, secret = gate.run(gate.gateway.keys.create(NewKey(owner=owner, role="member")))
    return secret


@contextmanager
def limited(tmp_path, *, gap_timeout: float = 600, **limits):
    changes = {"session_ttl": 600, "sequence_gap_timeout": gap_timeout, "limit": limits}
    with running_gateway(tmp_path, **changes) as gate:
        yield gate


def rest(gate) -> tinker.RestClient:
    return tinker.RestClient(base_url=gate.url, api_key=gate.settings.api_key)


def create_session(client):
    return client.post("/api/v1/create_session", json={"tags": [], "sdk_version": "test"})


def create_model(client, session: str, number: int, model: str = "tiny:full"):
    body = {"session_id": session, "model_seq_id": number, "base_model": model}
    return client.post("/api/v1/create_model", json=body)


def assert_exceeded(answer, *, limit: str, value: int, used: int) -> None:
    assert answer.status_code == 403
    body = answer.json()
    assert (body["type"], body["category"]) == ("limit_exceeded", "user")
    assert (body["limit"], body["limit_value"], body["used"]) == (limit, value, used)
    assert (f"TANDEM_LIMIT_{limit.upper()}" in body["error"]) == (limit not in BOUNDS)


# --- Limits that waiting does not help ----------------------------------------------------


def test_sessions_beyond_the_limit_are_403_for_that_owner_alone_until_one_ends(tmp_path):
    with limited(tmp_path, sessions=2) as gate, gate.http() as client:
        first = create_session(client).json()["session_id"]
        create_session(client)
        assert_exceeded(create_session(client), limit="sessions", value=2, used=2)
        with gate.http(key_of(gate, "bea")) as other:
            assert create_session(other).status_code == 200
        finish(client, first)
        assert create_session(client).status_code == 200


def test_runs_beyond_the_limit_are_403_and_one_that_is_there_is_not(tmp_path):
    with limited(tmp_path, runs=1) as gate, gate.http() as client:
        session = gate.session_id()
        created = create_model(client, session, 0).json()
        assert_exceeded(create_model(client, session, 1), limit="runs", value=1, used=1)
        assert create_model(client, session, 0).json() == created
        finish(client, session)
        assert create_model(client, gate.session_id(), 0).status_code == 200


def test_engines_beyond_the_limit_are_403_and_those_that_can_be_shared_are_not(tmp_path):
    with limited(tmp_path, samplers=1) as gate, gate.http() as client:
        other = str(make_model(tmp_path / "other"))
        gate.run(gate.gateway.models.add(name="other", path=other))
        session = gate.session_id()
        samplers = [
            create_sampler(client, session, number, model=model).json()["sampling_session_id"]
            for number, model in enumerate(("tiny", "tiny", "other"))
        ]
        assert [asample(client, s).status_code for s in samplers[:2]] == [200, 200]
        refused = asample(client, samplers[2])
        assert_exceeded(refused, limit="samplers", value=1, used=1)
        run_id = gate.run_id(session, 1, model="other:full")
        save = {"model_id": run_id, "seq_id": 1, "sampling_session_seq_id": 3}
        saving = client.post("/api/v1/save_weights_for_sampler", json=save).json()
        assert gate.retrieve(saving["request_id"]).json()["type"] == "limit_exceeded"
        assert gate.gateway.runs.get(run_id).parent == ""


def test_sampling_sessions_beyond_the_limit_are_403(tmp_path):
    with limited(tmp_path, sampling_sessions=2) as gate, gate.http() as client:
        session = gate.session_id()
        assert [create_sampler(client, session, n).status_code for n in (0, 1, 0)] == [200] * 3
        refused = create_sampler(client, session, 2)
        assert_exceeded(refused, limit="sampling_sessions", value=2, used=2)


def test_custom_losses_are_counted_over_all_sessions_of_an_owner(tmp_path):
    with limited(tmp_path, custom_losses=2) as gate, gate.http() as client:
        handle = traced(lambda logprobs: (logprobs.sum(), {}), logprobs=1)
        sessions = [gate.session_id() for _ in range(3)]
        answers = [
            client.post("/api/v1/create_custom_loss", content=request_body(handle, session_id=s))
            for s in sessions
        ]
        assert [a.status_code for a in answers] == [200, 200, 403]
        assert_exceeded(answers[2], limit="custom_losses", value=2, used=2)
        again = request_body(handle, session_id=sessions[0])
        assert client.post("/api/v1/create_custom_loss", content=again).status_code == 200
        finish(client, sessions[0])
        freed = request_body(handle, session_id=sessions[2])
        assert client.post("/api/v1/create_custom_loss", content=freed).status_code == 200


def test_checkpoint_bytes_are_checked_before_a_save_and_freed_by_a_deletion(tmp_path):
    with limited(tmp_path, checkpoint_bytes=130) as gate, gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        _, trainer = gate.worker("trainer")
        first = training.save_weights_for_sampler("one").result()  # 31 bytes
        training.save_weights_for_sampler("two").result()
        # A trainer's state is estimated at three times the size of the weights.
        with pytest.raises(
            tinker.RequestFailedError, match="limit_exceeded: the limit of checkpoint bytes is 130"
        ) as e:
            training.save_state("state").result()
        assert e.value.category is types.RequestErrorCategory.User
        assert [kind for kind, _ in trainer.applied] == ["publish", "publish"]
        rest(gate).delete_checkpoint_from_tinker_path(first.path).result()
        assert training.save_state("state").result().path.endswith("/weights/state")
        # Weights without a name are no checkpoint.
        assert training.save_weights_and_get_sampling_client().result()


def test_a_copy_counts_like_a_save(tmp_path):
    with limited(tmp_path, checkpoint_bytes=50) as gate, gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        saved = training.save_weights_for_sampler("one").result()
        with pytest.raises(tinker.PermissionDeniedError, match="checkpoint bytes is 50"):
            rest(gate).copy_weights(saved.path, destination_project_id="here").result()


def test_the_sdk_raises_a_limit_at_once_with_its_sentence(tmp_path):
    with limited(tmp_path, runs=1, sessions=1) as gate:
        with gate.service() as service:
            service.create_lora_training_client("tiny:full").result()
            with pytest.raises(tinker.PermissionDeniedError) as caught:
                service.create_lora_training_client("tiny:full").result()
            assert "the limit of runs is 1 for each owner" in str(caught.value)
            assert 'ServiceClient.close("success")' in str(caught.value)
            with pytest.raises(tinker.PermissionDeniedError, match="limit of sessions is 1"):
                gate.service().create_lora_training_client("tiny:full").result()
        with gate.http() as client:
            text = client.get("/metrics").text
        assert 'tandem_gateway_refusals_total{limit="runs"} 1.0' in text


# --- Limits that waiting helps ------------------------------------------------------------


@pytest.fixture
def held_run(tmp_path):
    """A run with room for four operations and a waiting trainer."""
    with limited(tmp_path, queued_operations=4) as gate, gate.http() as client:
        run_id = gate.run_id(gate.session_id())
        _, trainer = gate.worker("trainer")
        gate.run(trainer.gate.clear)
        yield gate, client, run_id, trainer


def test_operations_beyond_an_owners_queue_are_429_with_place_and_time_to_wait(held_run):
    gate, client, run_id, trainer = held_run
    assert [optim_step(client, run_id, seq).status_code for seq in (1, 2, 3, 4)] == [200] * 4
    refused = optim_step(client, run_id, 6)
    assert refused.status_code == 429
    body = refused.json()
    assert (body["type"], body["limit"]) == ("overloaded", "queued_operations")
    assert body["queue_position"] == 5
    assert 1 <= float(refused.headers["Retry-After"]) <= 10
    assert float(refused.headers["Retry-After"]) == body["retry_after_seconds"]
    gate.run(trainer.gate.set)
    wait_until(lambda: gate.gateway.limits.operations.total == 0)
    assert optim_step(client, run_id, 5).status_code == 200  # the refusal has left nothing
    assert gate.gateway.limits.operation_bytes.total <= 200


def test_the_operation_that_all_others_wait_for_is_let_into_a_full_queue(held_run):
    gate, client, run_id, trainer = held_run
    assert [optim_step(client, run_id, seq).status_code for seq in (5, 4, 3, 2)] == [200] * 4
    assert optim_step(client, run_id, 6).status_code == 429
    assert optim_step(client, run_id, 1).status_code == 200
    gate.run(trainer.gate.set)
    for seq in range(1, 6):
        assert gate.retrieve(f"{run_id}:{seq}").json()["type"] == "optim_step"


def test_one_owners_full_queue_leaves_another_owner_alone(held_run):
    gate, client, run_id, _ = held_run
    for seq in (1, 2, 3, 4):
        optim_step(client, run_id, seq)
    with gate.http(key_of(gate, "bea")) as other:
        session = create_session(other).json()["session_id"]
        run = create_model(other, session, 0).json()["model_id"]
        assert optim_step(other, run, 1).status_code == 200
        assert optim_step(other, run, 3).status_code == 200


def test_payloads_of_queued_operations_are_bounded_by_their_bytes(tmp_path):
    with limited(tmp_path, queued_bytes=2000) as gate, gate.http() as client:
        run_id = gate.run_id(gate.session_id())
        _, trainer = gate.worker("trainer")
        gate.run(trainer.gate.clear)
        gate.run(lambda: setattr(gate.gateway.runs.get(run_id).dispatcher, "_ready", False))

        def backward(seq_id: int):
            body = forward_backward_bytes(run_id, seq_id) + b"\x82\x7d\xbc\x05" + b"\0" * 700
            return client.post("/api/v1/forward_backward", content=body, headers=PROTO)

        assert [backward(seq).status_code for seq in (1, 2, 3)] == [200, 200, 429]
        assert backward(3).json()["limit"] == "queued_bytes"


def test_the_sdk_finishes_ten_times_more_than_the_queue_takes(tmp_path):
    with limited(tmp_path, queued_operations=3, waiting_samples=3) as gate:
        with gate.service() as service:
            training = service.create_lora_training_client("tiny:full").result()
            sampling = service.create_sampling_client(base_model="tiny").result()
            _, trainer = gate.worker("trainer")
            gate.run(trainer.gate.clear)
            futures = [
                training.forward_backward([supervised([1, 9])], "cross_entropy") for _ in range(30)
            ]
            samples = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(30)]
            refusals = gate.gateway.metrics.refusals.labels(limit="queued_operations")
            wait_until(lambda: refusals._value.get() > 0)
            assert gate.gateway.limits.operations.total <= 4
            gate.run(trainer.gate.set)
            for future in [*futures, *samples]:
                future.result()
        assert [seq for _, seq in trainer.applied] == list(range(1, 31))


def test_waiting_samples_of_an_owner_are_bounded_over_all_its_samplers(tmp_path):
    with limited(tmp_path, waiting_samples=2) as gate, gate.http() as client:
        sessions = [gate.session_id() for _ in range(2)]
        samplers = [create_sampler(client, s, 0).json()["sampling_session_id"] for s in sessions]
        gate.start_engines()
        for engine in gate.launcher.servicers.values():
            gate.run(engine.gate.clear)
        assert [asample(client, s, 0).status_code for s in samplers] == [200, 200]
        refused = asample(client, samplers[0], 1)
        assert (refused.status_code, refused.json()["limit"]) == (429, "waiting_samples")
        assert refused.json()["queue_position"] == 3
        for engine in gate.launcher.servicers.values():
            gate.run(engine.gate.set)
        wait_until(lambda: gate.gateway.limits.samples.total == 0)
        wait_until(lambda: gate.gateway.limits.held.total == 0)


# --- Memory -------------------------------------------------------------------------------


def test_what_a_client_sends_ten_times_too_fast_is_not_held_in_memory(tmp_path):
    """An idle trainer gets 40 MB of payloads. Memory holds 64 kB."""
    limits = {"held_bytes": 64_000, "queued_bytes": 20 * 2**20}
    with limited(tmp_path, gap_timeout=1.0, **limits) as gate, gate.http() as client:
        run_id = gate.run_id(gate.session_id())
        _, trainer = gate.worker("trainer")
        gate.run(trainer.gate.clear)
        padding = b"\x82\x7d\xc0\x9a\x0c" + b"\0" * 200_000  # an unknown field
        small = b"\x82\x7d\xa0\x9c\x01" + b"\0" * 20_000
        statuses = [
            client.post(
                "/api/v1/forward_backward",
                content=forward_backward_bytes(run_id, seq) + (padding if seq % 2 else small),
                headers=PROTO,
            ).status_code
            for seq in range(1, 401)
        ]
        run = gate.gateway.runs.get(run_id)
        assert statuses.count(200) + statuses.count(429) == 400
        assert statuses.count(429) > 100
        held = [len(o.payload or b"") for o in run.dispatcher._waiting.values()]
        assert sum(held) <= 64_000
        assert gate.gateway.limits.held.total <= 64_000
        assert gate.gateway.limits.operation_bytes.total <= 20 * 2**20 + 220_000
        wait_until(lambda: gate.gateway.limits.bodies.total == 0)
        gate.run(trainer.gate.set)
        wait_until(lambda: gate.gateway.limits.operations.total == 0)
        wait_until(lambda: gate.gateway.limits.held.total == 0)
        wait_until(lambda: gate.gateway.limits.operation_bytes.total == 0)


def test_samples_that_nobody_fetches_leave_memory_and_can_still_be_fetched(tmp_path):
    with limited(tmp_path, result_bytes=50_000) as gate, gate.http() as client:
        wide = make_model(tmp_path / "wide", window=4096)
        gate.run(gate.gateway.models.add(name="wide", path=str(wide)))
        sampler = create_sampler(client, gate.session_id(), 0, "wide").json()["sampling_session_id"]
        ids = [asample(client, sampler, n, prompt=LONG).json()["request_id"] for n in range(20)]
        futures = gate.gateway.futures
        wait_until(lambda: all(futures.get(each).ended for each in ids))
        wait_until(lambda: sum(futures.get(each).outcome.file is not None for each in ids) >= 17)
        assert gate.gateway.futures.bytes_held <= 50_000
        folder = gate.settings.data_dir / "results" / "samples"
        assert sum(len(futures.get(each).outcome.body) for each in ids) <= 50_000
        fetched = [gate.retrieve(each) for each in ids]
        assert {len(answer.content) for answer in fetched} == {len(fetched[-1].content)}
        assert fetched[0].content == fetched[-1].content
        assert fetched[0].headers["X-Tandem-Weight-Version"] == "base/wide"
        # Fetched samples go, with their files.
        gate.run(lambda: [futures.forget(each) for each in ids])
        wait_until(lambda: not any(path.is_file() for path in tree(folder)))


def test_of_samples_that_nobody_fetches_the_oldest_are_asked_for_again(tmp_path):
    with limited(tmp_path, results=3) as gate, gate.http() as client:
        sampler = create_sampler(client, gate.session_id(), 0).json()["sampling_session_id"]
        ids = []
        for n in range(5):
            ids.append(asample(client, sampler, n).json()["request_id"])
            wait_until(lambda: gate.gateway.limits.samples.total == 0)
        statuses = [gate.retrieve(each).status_code for each in ids]
        assert statuses == [410, 410, 200, 200, 200]


def test_results_of_operations_leave_memory_for_the_log(tmp_path):
    with limited(tmp_path, result_bytes=5000) as gate, gate.http() as client:
        run_id = gate.run_id(gate.session_id())
        for seq in range(1, 11):
            message = forward_backward_bytes(run_id, seq)
            for _ in range(40):  # 40 datums of one token list each
                message += _datum_bytes(100)
            client.post("/api/v1/forward_backward", content=message, headers=PROTO)
        wait_until(lambda: gate.gateway.limits.operations.total == 0)
        wait_until(lambda: gate.gateway.futures.bytes_held <= 5000)
        bodies = [gate.retrieve(f"{run_id}:{seq}").content for seq in range(1, 11)]
        assert len(set(bodies)) == 1
        assert len(bodies[0]) > 16_000


def _datum_bytes(tokens: int) -> bytes:
    from tandem.wire.v1 import tinker_pb2

    message = tinker_pb2.ForwardBackwardRequest()
    message.data.add().model_input.add().encoded_text.tokens = bytes(4 * tokens)
    return message.SerializeToString()


# --- The ledger ---------------------------------------------------------------------------


def ledger(**bounds) -> Ledger:
    return Ledger(
        limit="things", what="things", refused=lambda _limit: None, **({"in_all": 100} | bounds)
    )


def test_a_ledger_bounds_each_owner_and_all_together():
    things = ledger(per_owner=3, in_all=5)
    reserved = [things.reserve("ann") for _ in range(3)]
    with pytest.raises(Overloaded, match="of this owner"):
        things.reserve("ann")
    things.reserve("bea", 2)
    with pytest.raises(Overloaded, match="of all owners"):
        things.reserve("cia")
    reserved[0].release()
    reserved[0].release()
    assert things.total == 4
    assert things.has_room("ann", 1, share=1)
    assert not things.has_room("ann", 2, share=1)
    assert not things.has_room("bea", 0, share=0.5), "all together hold more than half"
    things.reserve("cia")


def test_one_thing_that_is_larger_than_the_bound_is_let_in_alone():
    things = ledger(per_owner=3, in_all=3)
    reservation = things.reserve("ann", 10)
    with pytest.raises(Overloaded):
        things.reserve("ann", 1)
    reservation.release()
    assert things.total == 0


def test_the_time_to_wait_follows_the_measured_rate_and_is_bounded():
    assert retry_after(20, waiting=1000) == 5
    assert retry_after(1000, waiting=10) == 1
    assert retry_after(0.001, waiting=1000) == 10
    now = [0.0]
    rate = Rate(clock=lambda: now[0])
    for _ in range(3000):
        now[0] += 0.1
        rate.note()
    assert rate.per_second() == pytest.approx(10, rel=0.02)
    now[0] += 300
    assert rate.per_second() < 0.01
