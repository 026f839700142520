"""The playground over HTTP, with runners that train nothing."""

from __future__ import annotations

import random
from functools import partial

import pytest
import tinker
from sqlalchemy import insert

from gateway.owners.auth.identity import Caller
from gateway.owners.auth.keys import NewKey
from gateway.playground.trials import MOST_WAITING, Trial
from gateway.storage.tables import usage
from tandem.settings.playground import PlaygroundSettings
from tests.support.audit_log import audit_log
from tests.support.gateway.running import KEY
from tests.support.gateway.visitors import (
    ASKED,
    PLAYGROUND,
    ClaimedByTest,
    PlaygroundClock,
    ask,
    claimed,
    key_of,
    started,
)
from tests.support.sdk import supervised
from tests.support.waiting import wait_until


@pytest.fixture
def start(start):
    return partial(start, playground=PlaygroundSettings(runs=1, tokens=100))


def trial(gate, trial_id: str) -> dict:
    return ask(gate, "GET", f"/trials/{trial_id}").json()


async def start_trial(gate, owner: str) -> Trial:
    """Start the trial of a new visitor."""
    key, _ = await gate.gateway.keys.create(NewKey(owner=owner, role="member"))
    caller = Caller(owner=owner, key_id=key.id, role="member")
    return await gate.gateway.playground.start_trial(caller, **ASKED, values={}, seed=0)


def session_of(claim: ClaimedByTest) -> str:
    """Return a session that the program of a claim begins."""
    trial_id = claim.trial["id"]
    return claim.gate.session_id(claim.key, project_id=trial_id, user_metadata=claim.metadata)


def test_a_second_trial_of_an_owner_is_refused_with_its_place_in_the_queue(start):
    with start() as gate:
        _, first = started(gate, "ann")
        key, second = started(gate, "ben")
        answer = ask(gate, "POST", "/trials", key, **ASKED)
        assert answer.status_code == 429
        assert answer.json()["queue_position"] == 2
        assert f"you have the trial {second} already, which is number 2" in answer.json()["error"]
        assert [trial(gate, each)["queue_position"] for each in (first, second)] == [1, 2]


def test_one_trial_trains_at_once_and_the_next_one_follows_it(start):
    with start() as gate:
        _, first = started(gate, "ann")
        _, second = started(gate, "ben")
        claim = claimed(gate)
        assert claim.trial["id"] == first
        assert claimed(gate).trial is None
        end = {"attempt": 1, "numbers": {"loss": 0.1}, "weights": "tinker://a:train:0/x/final"}
        ask(gate, "POST", f"/claims/{first}/end", **end)
        found = trial(gate, first)
        assert (found["state"], found["numbers"]) == ("open", {"loss": 0.1})
        assert claimed(gate).trial["id"] == second


def test_the_key_of_a_claim_is_the_visitors_and_ends_with_the_attempt(start):
    with start() as gate:
        started(gate, "ann")
        claim = claimed(gate)
        with gate.http(claim.key) as client:
            known = client.get(f"{PLAYGROUND}/trials")
            assert [each["owner"] for each in known.json()["trials"]] == ["ann"]
            assert client.get("/api/tandem/v1/keys").status_code == 403
            ask(gate, "POST", f"/claims/{claim.trial['id']}/end", attempt=1, error="it failed")
            assert client.get(f"{PLAYGROUND}/trials").status_code == 401
        found = trial(gate, claim.trial["id"])
        assert found["reason"] == "it failed"


def test_nothing_of_a_trial_is_left_when_its_time_is_over(start):
    """Its session, run, checkpoint and key."""
    with start() as gate:
        clock = PlaygroundClock(gate)
        key, mine = started(gate, "ann")
        claim = claimed(gate)
        # The client cannot end its session any more.
        with pytest.raises(tinker.AuthenticationError), claim.program() as service:
            training = service.create_lora_training_client("tiny:full").result()
            training.save_weights_for_sampler("final").result()
            clock.now += 3598
            assert ask(gate, "POST", f"/claims/{mine}", attempt=1).json() == {"goes_on": True}
            clock.passes(1)
            assert trial(gate, mine)["state"] == "running"
            clock.passes(1)
            wait_until(lambda: gate.run(gate.gateway.runs.all) == [])

        def ended() -> bool:
            clock.passes(1)
            return trial(gate, mine)["state"] == "ended"

        wait_until(ended)
        assert trial(gate, mine)["reason"] == "its time is over: 60 minutes"
        with gate.http() as client:
            runs = client.get("/api/v1/training_runs?access_scope=accessible").json()
            found = client.get("/api/v1/checkpoints?access_scope=accessible").json()
        assert len(runs["training_runs"]) == 1
        assert found["checkpoints"] == []
        assert [each.name for each in gate.gateway.keys.all() if each.name == mine] == []
        assert ask(gate, "POST", "/trials", key, **ASKED).status_code == 200


def test_the_trial_of_a_lost_runner_has_its_old_place_once(start):
    with start() as gate:
        clock = PlaygroundClock(gate)
        _, mine = started(gate, "ann")
        clock.passes(1)
        started(gate, "ben")
        session = session_of(claimed(gate))
        clock.passes(31)
        found = trial(gate, mine)
        assert (found["state"], found["queue_position"]) == ("waiting", 1)
        told = "its runner was silent for 30 s; no runner has asked for a trial for 31 s"
        assert found["reason"] == told
        wait_until(lambda: gate.gateway.sessions.get(session) is None)
        assert ask(gate, "POST", f"/claims/{mine}", attempt=1).json() == {"goes_on": False}
        late = {"attempt": 1, "numbers": {"loss": 1.0}}
        ask(gate, "POST", f"/claims/{mine}/end", **late)
        assert trial(gate, mine)["state"] == "waiting"
        assert claimed(gate).trial["attempt"] == 2
        clock.passes(31)
        found = trial(gate, mine)
        assert found["state"] in ("ending", "ended")
        assert found["reason"].endswith("2 times")


def test_a_trial_ends_with_its_budget_of_tokens(start):
    with start() as gate:
        clock = PlaygroundClock(gate)
        _, mine = started(gate, "ann")
        claim = claimed(gate)
        # The client cannot end its session any more.
        with pytest.raises(tinker.AuthenticationError), claim.program() as service:
            training = service.create_lora_training_client("tiny:full").result()
            for _ in range(2):
                train(training)

            def ended() -> bool:
                gate.run(gate.gateway.write_usage)
                gate.run(gate.gateway.database.flush())
                clock.passes(0)
                return trial(gate, mine)["state"] != "running"

            assert not ended()
            for _ in range(80):
                train(training)
            wait_until(ended)
        assert trial(gate, mine)["reason"].startswith("its budget is used up: ")
        assert trial(gate, mine)["reason"].endswith(" of 100 tokens")


def train(training: tinker.TrainingClient) -> None:
    training.forward_backward([supervised([1, 2, 3])], "cross_entropy").result()


def test_the_switch_stops_new_trials_and_claims_and_survives_a_restart(start):
    with start() as gate:
        _, mine = started(gate, "ann")
        assert ask(gate, "PUT", "", open=False).json()["open"] is False
        assert claimed(gate).trial is None
        refused = ask(gate, "POST", "/trials", key_of(gate, "ben"), **ASKED)
        assert (refused.status_code, refused.json()["error"]) == (
            403,
            "the playground is closed for now; come back later",
        )
    with start() as gate:
        assert claimed(gate).trial is None
        assert trial(gate, mine)["queue_position"] == 1
        ask(gate, "PUT", "", open=True)
        assert claimed(gate).trial["id"] == mine


def test_each_start_is_in_the_audit_log(start):
    with start() as gate:
        _, mine = started(gate, "ann")
        found = [each for each in audit_log(gate.http()) if each["event"] == "trial_start"]
        details = found[0]["event_details"]
        assert (details["target"], details["actor"]) == (mine, "tml:organization_user:ann")


def test_a_restarted_gateway_gives_a_runner_its_whole_time_again(start):
    with start() as gate:
        _, mine = started(gate, "ann")
        key = claimed(gate).key
    with start() as gate:
        assert ask(gate, "POST", f"/claims/{mine}", attempt=1).json() == {"goes_on": True}
        with gate.http(key) as client:
            assert client.get(f"{PLAYGROUND}/trials").status_code == 200


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"blueprint": "../secret"}, 400, "there is no blueprint '../secret'"),
        ({"blueprint": "sft-chat"}, 400, "tiny does not fit"),
        ({"model": "huge"}, 404, "unknown model 'huge'"),
        ({"values": {"steps": 1001}}, 400, "steps is 1001; allowed: from 1 to 1000"),
        ({"values": {"objective": "magic"}}, 400, "choose one of reinforce"),
        ({"values": {"stesp": 1}}, 400, "'stesp' is no parameter of grpo-arithmetic; known: steps"),
        ({"seed": -1}, 400, "seed"),
    ],
)
def test_a_wrong_request_is_refused_and_takes_no_place(start, change, status, said):
    with start() as gate:
        answer = ask(gate, "POST", "/trials", **ASKED | change)
        assert (answer.status_code, said in answer.json()["error"]) == (status, True), answer.text
        assert gate.gateway.playground.all() == []


def test_a_gateway_without_a_playground_says_so(start):
    with start(playground=PlaygroundSettings()) as gate:
        answer = ask(gate, "POST", "/trials", **ASKED)
        assert (answer.status_code, "TANDEM_PLAYGROUND_RUNS" in answer.text) == (403, True)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (2, 3, 4))]
)
def test_twenty_visitors_start_in_the_order_of_their_arrival(start, seed):
    """Within one place, on a virtual clock, with runners that die."""
    rng = random.Random(seed)
    with start(playground=PlaygroundSettings(runs=3, minutes=10)) as gate:
        clock, playground = PlaygroundClock(gate), gate.gateway.playground
        arrivals = sorted(rng.uniform(0, 300) for _ in range(20))
        begin, arrived, began = clock.now, list[str](), list[str]()
        ends: dict[str, tuple[int, float]] = {}

        async def live() -> None:
            for second in range(20 * 600):
                clock.now = begin + second
                while len(arrived) < 20 and arrivals[len(arrived)] <= second:
                    arrived.append((await start_trial(gate, f"visitor-{len(arrived)}")).id)
                while (claim := await playground.claim_trial()) is not None:
                    if claim.trial.id not in began:
                        began.append(claim.trial.id)
                    if rng.random() < 0.8:  # otherwise its runner dies
                        ends[claim.trial.id] = claim.trial.attempt, clock.now + rng.uniform(5, 400)
                for trial_id, (attempt, at) in list(ends.items()):
                    playground.hear_runner(trial_id, attempt)
                    if clock.now >= at:
                        del ends[trial_id]
                        result = {"numbers": {"loss": 0.1}, "violations": {}, "weights": ""}
                        await playground.finish_attempt(trial_id, attempt, error="", **result)
                await playground.look_at_trials()
                if len(began) == 20 and not playground.all():
                    return

        gate.run(live())
        assert playground.all() == []
        assert len(arrived) == 20
        places = [abs(place - began.index(each)) for place, each in enumerate(arrived)]
        assert max(places) <= 1


def test_a_full_queue_refuses_a_further_visitor(start):
    with start() as gate:

        async def fill() -> None:
            for number in range(MOST_WAITING):
                await start_trial(gate, f"visitor-{number}")

        gate.run(fill())
        answer = ask(gate, "POST", "/trials", **ASKED)
        assert (answer.status_code, answer.json()["queue_position"]) == (429, MOST_WAITING + 1)


def test_a_trial_ends_with_its_visitors_access(start):
    with start() as gate:
        clock = PlaygroundClock(gate)
        _, mine = started(gate, "ann")
        claim = claimed(gate)
        [key] = [each for each in gate.gateway.keys.all() if each.owner == "ann" and not each.name]
        gate.run(gate.gateway.keys.revoke(key.id))
        clock.passes(1)
        found = trial(gate, mine)
        assert found["state"] in ("ending", "ended")
        assert found["reason"] == "the key of the visitor was revoked"
        with gate.http(claim.key) as client:
            assert client.get(f"{PLAYGROUND}/trials").status_code == 401


def test_samples_in_sessions_of_a_trial_count_whichever_weights_they_have(start):
    with start() as gate:
        clock = PlaygroundClock(gate)
        _, mine = started(gate, "ann")
        session, other = session_of(claimed(gate)), gate.session_id()
        run = gate.run_id(other)
        for session_id in (session, other):
            note_sample(gate, session_id=session_id, run_id=run, tokens=60)
        clock.passes(0)
        assert gate.gateway.playground.used_tokens == {mine: 60}
        assert trial(gate, mine)["state"] == "running"


def note_sample(gate, *, session_id: str, run_id: str, tokens: int) -> None:
    row = {
        "hour": 2_000_000,
        "event": "sampling",
        "subject": f"{session_id}:sample:0",
        "run_id": run_id,
        "session_id": session_id,
        "owner": "ann",
        "base_model": "tiny",
        "count": 1,
        "input_tokens": 0,
        "cached_tokens": 0,
        "output_tokens": tokens,
        "accelerator_seconds": 0.0,
    }
    gate.run(gate.gateway.database.write(insert(usage), row))


def test_nobody_moves_a_session_from_or_into_the_project_of_a_trial(start):
    """Neither the visitor nor an administrator. So a trial cannot leave its time and tokens."""
    with start() as gate:
        key, mine = started(gate, "ann")
        session = session_of(claimed(gate))
        for secret in (key, KEY):
            with gate.http(secret) as client:
                away = {"project_id": "mine"}
                moved = client.put(f"/api/v1/sessions/{session}/project", json=away)
                body = {"tags": [], "sdk_version": "test", "project_id": mine}
                begun = client.post("/api/v1/create_session", json=body)
                own = gate.session_id(secret, project_id="elsewhere")
                into = client.put(f"/api/v1/sessions/{own}/project", json={"project_id": mine})
            for answer in (moved, begun, into):
                assert answer.status_code == 403, answer.text
                assert f"the project {mine} is a trial's" in answer.json()["error"]


def test_a_waiting_trial_says_why_and_ends_after_a_day(start):
    with start() as gate:
        clock = PlaygroundClock(gate)
        claimed(gate)
        _, mine = started(gate, "ann")
        assert trial(gate, mine)["reason"] == ""
        clock.passes(11)
        assert trial(gate, mine)["reason"] == "no runner has asked for a trial for 11 s"
        ask(gate, "PUT", "", open=False)
        assert trial(gate, mine)["reason"] == "the playground is closed for now"
        clock.passes(86_400)
        assert trial(gate, mine)["reason"] == "it has waited for 24 hours"


def test_a_visitor_that_may_only_read_now_starts_no_waiting_trial(start):
    with start() as gate:
        clock = PlaygroundClock(gate)
        _, mine = started(gate, "ann")
        [key] = [each for each in gate.gateway.keys.all() if each.owner == "ann"]
        key.role = "reader"
        clock.passes(1)
        assert trial(gate, mine)["reason"] == "the role reader of the visitor's key starts no trial"


def test_a_trial_that_cannot_be_removed_holds_up_no_other(start, monkeypatch):
    with start(playground=PlaygroundSettings(runs=2, tokens=100)) as gate:
        clock, playground = PlaygroundClock(gate), gate.gateway.playground
        (_, first), (_, second) = started(gate, "ann"), started(gate, "ben")
        claimed(gate), claimed(gate)
        remove = playground._remove_things

        async def fail(each) -> None:
            if each.id == first:
                raise RuntimeError("it cannot be removed")
            await remove(each)

        monkeypatch.setattr(playground, "_remove_things", fail)
        ask(gate, "POST", f"/trials/{first}/end")
        clock.passes(3601)
        clock.passes(1)
        assert trial(gate, first)["state"] == "ending"
        assert trial(gate, second)["state"] == "ended"
