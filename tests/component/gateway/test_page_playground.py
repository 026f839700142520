"""The pages of the playground without a browser, with runners that train nothing."""

from __future__ import annotations

import html
import re

import pytest

from gateway.api.pages import live
from tandem.blueprints import catalog
from tandem.settings.playground import PlaygroundSettings
from tests.support.audit_log import audit_log
from tests.support.gateway.browsers import events, log, signed_in, token_in
from tests.support.gateway.running import running_gateway
from tests.support.gateway.visitors import (
    PlaygroundClock,
    ask,
    claimed,
    key_of,
    saved_weights,
    started,
)
from tests.support.waiting import wait_until

HOSTILE = "<script>alert(1)</script> \u202e"
NAME = '<b>"&'
ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt; \ufffd"


@pytest.fixture
def gate(tmp_path):
    playground = PlaygroundSettings(runs=1, tokens=100)
    with running_gateway(tmp_path, session_ttl=600, playground=playground) as gate:
        yield gate


def form_of(answer, blueprint="grpo-arithmetic") -> dict[str, str]:
    """Return the fields of a blueprint's form with their values, as a browser sends them."""
    forms = re.findall(
        r'<form method="post" action="/playground/trials">.*?</form>', answer.text, re.S
    )
    form = next(each for each in forms if f'value="{blueprint}"' in each)
    found = dict[str, str]()
    for tag in re.findall(r"<input [^>]*>", form):
        at = dict(re.findall(r'(\w+)="([^"]*)"', tag))
        if at.get("type") != "checkbox" or " checked" in tag:
            found[html.unescape(at["name"])] = html.unescape(at["value"])
    for name, options in re.findall(r'<select [^>]*name="([^"]*)">(.*?)</select>', form, re.S):
        chosen = re.search(r"<option selected>([^<]*)", options) or re.search(
            r"<option>([^<]*)", options
        )
        found[html.unescape(name)] = html.unescape(chosen[1])
    return found


def start_in(client, **changes: str):
    form = form_of(client.get("/playground"))
    return client.post("/playground/trials", data=form | changes)


def test_a_form_starts_a_trial_with_its_values_without_a_script(gate):
    with signed_in(gate, key_of(gate, "ann")) as client:
        form = form_of(client.get("/playground"))
        assert form["value:steps"] == "10"
        assert form["value:objective"] == "reinforce"
        assert form["value:learning_rate"] == "0.00045"
        form |= {"value:steps": "7", "value:objective": "rloo", "seed": "3"}
        answer = client.post("/playground/trials", data=form)
        assert answer.status_code == 303
        [trial] = gate.gateway.playground.all()
        assert answer.headers["location"] == f"/playground/trials/{trial.id}"
        assert (trial.owner, trial.seed, trial.values["steps"]) == ("ann", 3, 7)
        assert trial.values["objective"] == "rloo"
        shown = client.get(answer.headers["location"]).text
        assert 'Number <b class="num">1</b> in the queue' in shown
        assert "rloo" in shown
        assert "is number 1 in the queue" in client.get("/playground").text
    found = [
        each["event_details"] for each in audit_log(gate.http()) if each["event"] == "trial_start"
    ]
    assert [each["target"] for each in found] == [trial.id]


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"value:steps": "1001"}, 400, "Steps is 1001; allowed: from 1 to 1000."),
        ({"value:steps": "9" * 400}, 400, "Steps is 999"),
        ({"value:steps": "many"}, 400, "Steps is &#39;many&#39;, not of the type int."),
        ({"value:learning_rate": "nan"}, 400, "Learning_rate is nan"),
        ({"value:learning_rate": "inf"}, 400, "Learning_rate is inf"),
        ({"value:objective": HOSTILE}, 400, "choose one of reinforce"),
        ({f"value:{HOSTILE}": "1"}, 400, "is no parameter of grpo-arithmetic"),
        ({"seed": "-1"}, 400, "Seed: Input should be greater than or equal to 0."),
        ({"seed": "one"}, 400, "The seed is no whole number."),
        ({"model": "huge"}, 404, "Unknown model &#39;huge&#39;"),
        ({"blueprint": "nothing"}, 400, "There is no blueprint &#39;nothing&#39;"),
    ],
)
def test_a_wrong_entry_is_named_and_the_others_stay_in_the_form(gate, changes, status, said):
    with signed_in(gate, key_of(gate, "ann")) as client:
        answer = start_in(client, **{"value:warm_up_steps": "17", "seed": "5"} | changes)
        assert answer.status_code == status
        assert said in re.search(r'role="alert">(.*?)</p>', answer.text)[1]
        assert "<script>alert" not in answer.text
        if "blueprint" not in changes:
            assert form_of(answer)["value:warm_up_steps"] == "17"
            assert "<details open>" in answer.text
    assert gate.gateway.playground.all() == []


def test_a_second_trial_is_refused_with_its_place(gate):
    started(gate, "zoe")
    key, mine = started(gate, "ann")
    with signed_in(gate, key) as client:
        answer = start_in(client)
        assert answer.status_code == 429
        assert f"You have the trial {mine} already, which is number 2 in the queue" in answer.text


def test_a_closed_playground_says_so_and_starts_nothing(gate):
    ask(gate, "PUT", "", open=False)
    with signed_in(gate, key_of(gate, "ann")) as client:
        assert "No trial starts now. Come back later." in client.get("/playground").text
        answer = start_in(client)
        assert answer.status_code == 403
        assert "The playground is closed for now; come back later." in answer.text


def test_only_a_gateway_with_a_playground_has_it_in_the_navigation(gate, tmp_path):
    with signed_in(gate) as client:
        assert 'href="/playground"' in client.get("/").text
        assert '<a href="/playground" aria-current="page">' in client.get("/playground").text
    with running_gateway(tmp_path / "plain") as plain, signed_in(plain) as client:
        assert 'href="/playground"' not in client.get("/").text
        assert "TANDEM_PLAYGROUND_RUNS" in client.get("/playground").text


def test_a_form_offers_the_fitting_models_only(gate):
    with signed_in(gate) as client:
        shown = client.get("/playground").text
    chat = re.search(r"Supervised fine-tuning of a chat</h2>.*?</section>", shown, re.S)[0]
    assert "No base model here fits. It is for my/chat, " in chat
    assert "<form" not in chat


@pytest.mark.parametrize("role", ["reader", "ci"])
def test_a_key_without_the_right_sees_the_blueprints_without_forms(gate, role):
    with signed_in(gate, key_of(gate, "ann", role)) as client:
        shown = client.get("/playground")
        assert "GRPO on arithmetic" in shown.text
        assert "/playground/trials" not in shown.text
        assert "Your key may only read" in shown.text
        token = {"form_token": token_in(shown)}
        assert client.post("/playground/trials", data=token).status_code == 403


@pytest.mark.parametrize(("role", "forms"), [("reader", 0), ("ci", 0), ("member", 1)])
def test_only_a_member_may_chat_with_its_trial_and_end_it(gate, role, forms):
    _, mine = started(gate, "ann")
    claim = claimed(gate)
    claim.end(weights=(weights := saved_weights(claim)))
    with signed_in(gate, key_of(gate, "ann", role)) as client:
        shown = client.get(f"/playground/trials/{mine}").text
        assert weights in shown
        assert (shown.count('href="/chat?'), shown.count(f"{mine}/end")) == (forms, forms)
        run = client.get(f"/runs/{weights.split('/')[2]}").text
        assert run.count('href="/chat?') == forms


@pytest.mark.parametrize("role", ["maintainer", "admin"])
def test_a_refused_form_shows_the_staff_the_trials_of_all(gate, role):
    started(gate, "ann")
    with signed_in(gate, key_of(gate, "max", role)) as client:
        answer = start_in(client, seed="one")
        assert answer.status_code == 400
        for shown in (answer, client.get("/playground")):
            assert "All trials" in shown.text
            assert "/playground/switch" in shown.text


@pytest.mark.parametrize("role", ["maintainer", "admin"])
def test_the_staff_has_the_switch_and_ends_the_trials_of_others(gate, role):
    _, first = started(gate, "ann")
    started(gate, "ben")
    with signed_in(gate, key_of(gate, "max", role)) as client:
        shown = client.get("/playground")
        rows = re.findall(r"<tr><td>(.*?)</td>.*?</tr>", shown.text, re.S)
        assert rows == ["ann", "ben"]
        token = {"form_token": token_in(shown)}
        assert client.get(f"/playground/trials/{first}").status_code == 200
        ended = client.post(f"/playground/trials/{first}/end", data=token)
        assert (ended.status_code, ended.headers["location"]) == (303, "/playground")
        client.post("/playground/switch", data=token | {"open": "no"})
        assert gate.gateway.playground.closed
        assert "Open the playground" in client.get("/playground").text
        client.post("/playground/switch", data=token | {"open": "yes"})
        assert not gate.gateway.playground.closed
    trial = ask(gate, "GET", f"/trials/{first}").json()
    assert trial["reason"] == "max ended it"
    found = {each["event"] for each in audit_log(gate.http())}
    assert {"trial_end", "playground_change"} <= found


def test_a_visitor_sees_neither_the_switch_nor_the_trials_of_others(gate):
    started(gate, "ann")
    with signed_in(gate, key_of(gate, "ben")) as client:
        shown = client.get("/playground")
        assert "/playground/switch" not in shown.text
        assert "ann" not in re.findall(r"<td>(.*?)</td>", shown.text)
        assert '<b class="num">1</b> wait' in shown.text
        form = {"form_token": token_in(shown), "open": "no"}
        assert client.post("/playground/switch", data=form).status_code == 403
        assert not gate.gateway.playground.closed


def test_anothers_trial_is_answered_as_a_missing_one(gate):
    _, mine = started(gate, "ann")
    with signed_in(gate, key_of(gate, "ben")) as client:
        form = {"form_token": token_in(client.get("/playground"))}
        for method, path in (("GET", ""), ("GET", "/live"), ("POST", "/end")):
            real, none = (
                client.request(method, f"/playground/trials/{name}{path}", data=form)
                for name in (mine, "trial-000000000000")
            )
            assert real.status_code == 404
            assert real.text.replace(mine, "trial-000000000000") == none.text
    assert gate.gateway.playground.all()[0].state == "waiting"


def test_a_form_of_another_site_ends_nothing(gate):
    key, mine = started(gate, "ann")
    with signed_in(gate, key) as client:
        assert client.post(f"/playground/trials/{mine}/end").status_code == 400
    assert gate.gateway.playground.all()[0].state == "waiting"


def test_a_maintainer_sees_the_weights_of_no_other_owner(gate):
    _, mine = started(gate, "ann")
    claim = claimed(gate)
    claim.end(numbers={"greedy": 1.0}, weights=saved_weights(claim))
    for role, found in (("maintainer", 0), ("admin", 1)):
        with signed_in(gate, key_of(gate, "max", role)) as client:
            shown = client.get(f"/playground/trials/{mine}").text
            assert "The tuned model is ready." in shown
            assert shown.count("/chat?") == found


@pytest.mark.parametrize("rank", [0, 8])
def test_an_open_trial_has_its_numbers_a_chat_a_download_and_commands(gate, rank):
    key, mine = started(gate, "ann")
    claim = claimed(gate)
    weights = saved_weights(claim, rank=rank)
    claim.end(
        numbers={"last reward": 0.25, "greedy": 1.0},
        violations={"last reward": "0.25, and at least 0.9 is expected"},
        weights=weights,
    )
    run, _, name = weights.removeprefix("tinker://").split("/")
    with signed_in(gate, key) as client:
        shown = client.get(f"/playground/trials/{mine}").text
        said = html.unescape(shown)
        assert "The tuned model is ready." in shown
        assert "0.25, and at least 0.9 is expected" in shown
        assert "within" in re.search(r'<th scope="row">greedy.*?</tr>', shown, re.S)[0]
        assert f"tandem checkpoints export {weights}" in said
        assert f'data-copy="tandem checkpoints export {weights}' in said
        assert "vllm serve" in said
        assert ("--enable-lora" in said) == bool(rank)
        assert "kind: InferenceService" in said
        assert ("s3://BUCKET/BASE" in said) == bool(rank)
        assert str(gate.settings.data_dir) not in said
        chat = re.search(r'href="(/chat\?[^"]+)"', said)[1]
        beside = client.get(chat).text
        assert f'<option value="{weights}" selected>' in beside
        assert '<option value="tiny" selected>' in beside
        download = client.get(f"/runs/{run}/files/sampler_weights/{name}")
        assert "safetensors" in download.text
        assert f"/runs/{run}/files/sampler_weights/{name}" in said.replace("%3A", ":")


def test_the_runs_of_a_trial_are_shown_with_their_curves(gate):
    key, mine = started(gate, "ann")
    claim = claimed(gate)
    with signed_in(gate, key) as client:
        assert "No run yet." in client.get(f"/playground/trials/{mine}").text
        with claim.program() as service:
            training = service.create_lora_training_client(
                "tiny:full", user_metadata={"name": HOSTILE, "config": '{"total_steps": 4}'}
            ).result()
            run = training.model_id
            for step in range(3):
                log(gate, run, step=step, reward=step / 4)
            shown = client.get(f"/playground/trials/{mine}").text
    assert "<script>alert" not in shown
    assert f'<a href="/runs/{run}"><bdi>{ESCAPED}</bdi></a>' in shown.replace("%3A", ":")
    assert 'aria-label="reward: 0.5 at step 2"' in shown
    assert "75.0 percent" in shown


def test_hostile_texts_of_blueprints_and_programs_stay_text(gate, tmp_path, monkeypatch):
    folder = tmp_path / "blueprints" / "odd"
    folder.mkdir(parents=True)
    folder.joinpath("train.py").touch()
    folder.joinpath("blueprint.toml").write_text(
        f"""
title = '{HOSTILE}'
about = '''{HOSTILE} "'''
[needs]
minutes = 1
[parameters.'{NAME}']
about = '{HOSTILE}'
type = "str"
default = '{HOSTILE}"'
[parameters.kind]
about = "b"
type = "str"
default = "a"
choices = ["a", '{HOSTILE}']
[parameters.flag]
about = "c"
type = "bool"
default = true
[metrics.'{HOSTILE}']
at_least = 1
"""
    )
    broken = tmp_path / "blueprints" / "broken"
    broken.mkdir()
    broken.joinpath("blueprint.toml").write_text(f"title = '{HOSTILE}' '")
    monkeypatch.setattr(catalog, "_OURS", tmp_path / "blueprints")
    with signed_in(gate) as client:
        shown = client.get("/playground")
        form = form_of(shown, "odd")
        assert form[f"value:{NAME}"] == f'{HOSTILE}"'.replace("\u202e", "\ufffd")
        assert form["value:flag"] == "true"
        started_at = client.post("/playground/trials", data=form | {"value:flag": "false"}).headers[
            "location"
        ]
        trial = gate.gateway.playground.all()[0]
        assert trial.values["flag"] is False
        claimed(gate).end(numbers={HOSTILE: 0.5}, violations={HOSTILE: HOSTILE}, weights=HOSTILE)
        page = client.get(started_at)
        gate.run(gate.gateway.playground.end_trial(trial, HOSTILE))
        ended = client.get(started_at)
        listed = client.get("/playground")
    for answer in (shown, page, ended, listed):
        assert "<script>alert" not in answer.text
        assert "\u202e" not in answer.text
        assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert f"{ESCAPED}</span>" in page.text
    assert ESCAPED in ended.text


def test_the_page_of_a_waiting_trial_tells_its_new_place_and_its_end(gate, monkeypatch):
    monkeypatch.setattr(live, "PERIOD", 0.02)
    clock = PlaygroundClock(gate)
    _, first = started(gate, "zoe")
    clock.passes(1)
    key, mine = started(gate, "ann")
    with (
        signed_in(gate, key) as client,
        client.stream("GET", f"/playground/trials/{mine}/live?after=") as answer,
    ):
        found = (data["parts"] for kind, data in events(answer) if kind == "changes")

        def until(text: str) -> dict[str, str]:
            return next(parts for parts in found if text in parts.get("trial_state", ""))

        until('Number <b class="num">2</b>')
        ask(gate, "POST", f"/trials/{first}/end")
        until('Number <b class="num">1</b>')
        claimed(gate)
        until("1.0 h left")
        clock.passes(3600)
        parts = until("The trial has ended.")
        assert "Its time is over: 60 minutes." in parts["trial_state"]


def test_the_queue_moves_by_itself(gate, monkeypatch):
    monkeypatch.setattr(live, "PERIOD", 0.02)
    with (
        signed_in(gate, key_of(gate, "ben")) as client,
        client.stream("GET", "/playground/live?after=") as answer,
    ):
        found = (data["parts"]["playground_state"] for kind, data in events(answer) if kind)
        assert '<b class="num">0</b> wait' in next(found)
        started(gate, "ann")
        assert '<b class="num">1</b> wait' in next(found)


def test_an_ended_trial_tells_the_reason_and_offers_no_weights(gate):
    clock = PlaygroundClock(gate)
    key, mine = started(gate, "ann")
    claimed(gate).end(error=f"the program failed: {HOSTILE}")
    wait_until(
        lambda: clock.passes(1) or ask(gate, "GET", f"/trials/{mine}").json()["state"] == "ended"
    )
    with signed_in(gate, key) as client:
        shown = client.get(f"/playground/trials/{mine}").text
        assert f"The program failed: {ESCAPED}" in shown
        assert "/chat?" not in shown
        assert "Earlier trials" in client.get("/playground").text
        assert start_in(client).status_code == 303
