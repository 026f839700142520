"""Limits and budgets of owners, with fake trainers. A batch has 3 tokens and takes 0.5 seconds."""

from __future__ import annotations

from functools import partial

import pytest
import tinker
from tinker import types

from gateway.owners.auth.keys import NewKey
from tests.support.audit_log import audit_log
from tests.support.gateway.runs import SELDOM, Run, ended, run_of, train
from tests.support.sdk import supervised
from tests.support.waiting import wait_until

OWN = "/api/tandem/v1"
LOCAL = f"{OWN}/owners/local"


@pytest.fixture
def start(start):
    return partial(start, recovery=SELDOM)


def change(gate, **fields) -> dict:
    answer = gate.http().patch(LOCAL, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def key_of(gate, owner: str, role: str = "member") -> str:
    return gate.run(gate.gateway.keys.create(NewKey(owner=owner, role=role)))[1]


def test_an_owners_own_limit_replaces_that_of_the_settings_until_it_is_removed(start):
    with start() as gate:
        session = gate.session_id()
        assert change(gate, runs=1)["own"] == ["runs"]
        gate.run_id(session, 0)
        body = {"session_id": session, "model_seq_id": 1, "base_model": "tiny:full"}
        refused = gate.http().post("/api/v1/create_model", json=body)
        assert refused.status_code == 403
        assert "the limit of runs is 1 for local, 1 are used" in refused.json()["error"]
        found = change(gate, runs=None)
        assert (found["own"], found["limits"]["runs"], found["used"]["runs"]) == ([], 128, 1)
        gate.run_id(session, 1)


def test_a_used_up_budget_of_tokens_ends_the_run_after_its_running_operation(start):
    with start() as gate:
        run = Run.new(gate)
        budget = change(gate, tokens=7)["budget"]
        assert (budget["used_tokens"], budget["exhausted"]) == (0, False)
        for seq_id in range(1, 9):
            run.backward(seq_id)
        outcomes = [run.outcome(seq_id) for seq_id in range(1, 9)]
        failed = [answer.json()["type"] for answer in outcomes[3:]]
        assert failed == ["budget_exhausted"] * 5
        row = wait_until(lambda: ended(gate, run.id))
        assert "the budget of local is used up: 9 of 7 tokens" in row["reason"]
        assert f"tinker://{run.id}/weights/stopped-0" in row["reason"]
        kinds = [kind for kind, _ in run.trainer.applied]
        assert kinds == ["forward_backward"] * 3 + ["save"], "it overran by one operation"
        assert gate.http().get(LOCAL).json()["budget"]["exhausted"]


def test_a_budget_of_device_hours_ends_all_runs_of_its_owner_and_of_nobody_else(start):
    with start() as gate:
        runs = [Run.new(gate), Run.new(gate)]
        change(gate, device_hours=1.2 / 3600)
        train(runs[0], 1)
        train(runs[1], 1)
        for run in runs:
            row = wait_until(lambda run=run: ended(gate, run.id))
            assert "device-hours" in row["reason"]
        body = {"session_id": gate.session_id(), "model_seq_id": 0, "base_model": "tiny:full"}
        refused = gate.http().post("/api/v1/create_model", json=body)
        assert (refused.status_code, refused.json()["type"]) == (403, "budget_exhausted")
        key = key_of(gate, "ben")
        with gate.http(key) as ben:
            body["session_id"] = gate.session_id(key)
            assert ben.post("/api/v1/create_model", json=body).status_code == 200


def test_a_used_up_budget_survives_a_restart_and_ends_when_it_is_raised_or_counts_anew(start):
    with start() as gate:
        run = Run.new(gate)
        change(gate, tokens=3)
        run.backward(1)
        run.outcome(1)
        wait_until(lambda: ended(gate, run.id))
    with start() as gate:
        budget = gate.http().get(LOCAL).json()["budget"]
        assert (budget["used_tokens"], budget["exhausted"]) == (3, True)
        body = {"session_id": gate.session_id(), "model_seq_id": 0, "base_model": "tiny:full"}
        assert gate.http().post("/api/v1/create_model", json=body).status_code == 403
        assert not change(gate, tokens=4)["budget"]["exhausted"]
        assert change(gate, tokens=3)["budget"]["exhausted"]
        budget = change(gate, anew=True)["budget"]
        assert (budget["used_tokens"], budget["exhausted"]) == (0, False)
        assert gate.http().post("/api/v1/create_model", json=body).status_code == 200
        assert change(gate, tokens=None)["budget"] is None


def test_a_lower_budget_ends_runs_at_once_and_samples_are_refused(start):
    with start() as gate, gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        change(gate, tokens=1000)
        training.forward_backward([supervised([1, 9])], "cross_entropy").result()
        change(gate, tokens=1)
        with pytest.raises(tinker.RequestFailedError, match="budget_exhausted"):
            training.optim_step(types.AdamParams()).result()
        sampler = service.create_sampling_client(base_model="tiny").result()
        prompt = types.ModelInput.from_ints([1, 2])
        with pytest.raises(tinker.PermissionDeniedError, match="budget of local is used up"):
            sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result()


def test_samples_count_toward_a_budget(start):
    with start() as gate, gate.service() as service:
        change(gate, tokens=10**6)
        sampler = service.create_sampling_client(base_model="tiny").result()
        prompt = types.ModelInput.from_ints([1, 2])
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result()
        assert gate.http().get(LOCAL).json()["budget"]["used_tokens"] > 0


def test_an_owner_reads_its_own_and_nobody_elses(start):
    with start() as gate:
        change(gate, runs=5)
        with gate.http(key_of(gate, "ann", "reader")) as ann:
            assert [each["owner"] for each in ann.get(f"{OWN}/owners").json()["owners"]] == ["ann"]
            assert ann.get(f"{OWN}/owners/ann").json()["budget"] is None
            assert ann.get(LOCAL).json()["type"] == "unknown_owner"
            assert ann.patch(f"{OWN}/owners/ann", json={"runs": 9}).status_code == 403
        names = [each["owner"] for each in gate.http().get(f"{OWN}/owners").json()["owners"]]
        assert names == ["ann", "local"]
        changes = [each for each in audit_log(gate.http()) if each["event"] == "owner_change"]
        details = [each["event_details"] for each in changes]
        assert [each["status"] for each in details] == [200, 403]
        assert (details[0]["target"], details[0]["runs"]) == ("local", "5")


def test_a_wrong_change_is_refused_with_its_field(start):
    with start() as gate:
        assert change(gate, runs=5470.0)["limits"]["runs"] == 5470
        wrong = ({"runs": "0"}, {"runs": True}, {"runs": -1}, {"tokens": 1.5}, {"rusn": 1})
        for body in (*wrong, {"device_hours": "1"}, {"device_hours": -1}, {"device_hours": True}):
            answer = gate.http().patch(LOCAL, json=body)
            assert (answer.status_code, answer.json()["type"]) == (400, "invalid_request")
            assert next(iter(body)) in answer.json()["error"]


def test_operations_of_a_budget_are_not_sent_ahead(start):
    with start() as gate:
        change(gate, tokens=1000)
        run = Run.new(gate)
        run.hold()
        for seq_id in (1, 2, 3):
            run.backward(seq_id)
        wait_until(lambda: run_of(run).dispatcher.queued == 3)
        assert run_of(run).dispatcher.under_way == 1
        run.release()


def test_a_budget_that_was_used_up_just_before_a_crash_ends_the_run_at_the_next_start(start):
    with start() as gate:
        run = Run.new(gate)
        change(gate, tokens=3)
        gate.gateway.budgets.on_exhausted = lambda: None  # the crash comes first
        run.backward(1)
        run.outcome(1)
    with start() as gate:
        row = wait_until(lambda: ended(gate, run.id))
        assert "the budget of local is used up: 3 of 3 tokens" in row["reason"]
        run.client.post("/api/v1/session_heartbeat", json={"session_id": run.session_id})
        run.backward(2)
        assert gate.retrieve(f"{run.id}:2").json()["type"] == "budget_exhausted"
