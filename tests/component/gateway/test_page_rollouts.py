"""The pages of a run's rollouts."""

from __future__ import annotations

import re

import pytest

from gateway.owners.auth.keys import NewKey
from tests.support.gateway.running import KEY
from tests.support.gateway.speaking_models import byte_tokenizer, speaking_gateway

HOSTILE = "<script>alert(1)</script>\u202e<b>"


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    with speaking_gateway(tmp_path_factory.mktemp("rollouts"), session_ttl=600) as gate:
        yield gate


@pytest.fixture(scope="module")
def run(gate):
    with gate.service() as service:
        return service.create_lora_training_client("speaker:full").result().model_id


@pytest.fixture
def send(gate, run):
    def sent(batch: str, step: int, *rollouts: dict[str, object]) -> None:
        body = {"batch": batch, "step": step, "rollouts": rollouts}
        with gate.http() as client:
            answer = client.post(f"/api/tandem/v1/runs/{run}/rollouts", json=body)
        assert answer.json()["rollouts"] == len(rollouts), answer.text

    return sent


def page(gate, path, *, key=KEY, status=200):
    with gate.http(key) as client:
        answer = client.get(path, headers={"Accept": "text/html"})
    assert answer.status_code == status, answer.text
    return answer.text


def answers(shown):
    return re.findall(r'<bdi class="answer">(.*?)</bdi>', shown)


def test_a_run_without_rollouts_says_how_to_send_them(gate, run):
    assert "No rollouts yet" in page(gate, f"/runs/{run}/rollouts")


def test_rollouts_are_shown_by_step_and_reward_and_found_by_text(gate, run, send):
    send("a1", 1, {"prompt": "2+2", "answer": "five", "reward": 0.0})
    send("a2", 2, *({"prompt": "q", "answer": f"answer {n}", "reward": n / 4} for n in range(3)))
    newest = page(gate, f"/runs/{run}/rollouts")
    assert answers(newest) == ["answer 0", "answer 1", "answer 2"]
    row = re.search(r'<tr class="chosen">.*?</tr>', newest)[0]
    assert re.findall(r"<td>([^<]*)</td>", row) == ["3", "0", "0.25", "0.5"]
    best = page(gate, f"/runs/{run}/rollouts?step=2&order=-reward")
    assert answers(best) == ["answer 2", "answer 1", "answer 0"]
    assert answers(page(gate, f"/runs/{run}/rollouts?step=2&search=ANSWER 1")) == ["answer 1"]
    assert answers(page(gate, f"/runs/{run}/rollouts?step=1")) == ["five"]


def test_a_long_step_comes_in_pages(gate, run, send):
    send("long", 30, *({"answer": f"n{n}", "reward": None} for n in range(60)))
    shown = page(gate, f"/runs/{run}/rollouts?step=30")
    seen = answers(shown)
    while following := re.search(r'href="([^"]+)">Later<', shown):
        shown = page(gate, following[1].replace("&amp;", "&"))
        seen += answers(shown)
    assert seen == [f"n{n}" for n in range(60)]


def test_tokens_are_coloured_by_logprob_or_advantage_if_asked(gate, run, send):
    ids = byte_tokenizer().encode("the <b>", add_special_tokens=False).ids
    count = len(ids)
    send(
        "tokens",
        40,
        {
            "answer": "the <b>",
            "tokens": ids,
            "logprobs": [-0.1, *[-9.0] * (count - 1)],
            "advantages": [2.0, -2.0, *[0.0] * (count - 2)],
            "reward": "NaN",
        },
    )
    address = f"/runs/{run}/rollouts/40/0"
    plain = page(gate, address)
    assert 'class="token "' in plain
    texts = re.findall(r'<span class="token[^>]*>([^<]*)</span>', plain)
    assert "".join(texts) == "the &lt;b&gt;"
    by_logprob = page(gate, f"{address}?colour=logprob")
    assert re.findall(r'class="token (l\d)"', by_logprob) == ["l0", *["l9"] * (count - 1)]
    assert f'title="token {ids[0]}, logprob -0.1"' in by_logprob
    by_advantage = page(gate, f"{address}?colour=advantage")
    assert re.findall(r'class="token (\w*)"', by_advantage) == ["p5", "n5", *[""] * (count - 2)]


def test_hostile_text_and_odd_values_stay_text(gate, run, send):
    send(
        "hostile",
        50,
        {
            "prompt": [{"role": HOSTILE, "content": HOSTILE}],
            "answer": {"text": HOSTILE},
            "tokens": ["x", -1, 2**40, None],
            "logprobs": "many",
            HOSTILE: [HOSTILE, 1.5, None],
        },
    )
    for address in ("?step=50", "/50/0?colour=logprob"):
        shown = page(gate, f"/runs/{run}/rollouts{address}")
        assert "<script>alert" not in shown
        assert "&lt;script&gt;alert(1)" in shown
        assert "\u202e" not in shown


def test_a_rollout_of_a_mebibyte_is_cut_until_all_is_asked_for(gate, run, send):
    send("large", 60, {"answer": "x" * 500_000 + "end", "tokens": [65] * 100_000, "reward": 1})
    short = page(gate, f"/runs/{run}/rollouts/60/0")
    assert len(short) < 500_000
    assert "Show all" in short
    whole = page(gate, f"/runs/{run}/rollouts/60/0?whole=true")
    assert "xxend" in whole
    assert whole.count('class="token') >= 100_000
    assert "Show all" not in whole
    assert len(page(gate, f"/runs/{run}/rollouts?step=60")) < 20_000


def test_another_owner_sees_neither_the_list_nor_a_rollout(gate, run, send):
    send("mine", 70, {"answer": "secret"})
    key = gate.run(gate.gateway.keys.create(NewKey(owner="zoe", role="member")))[1]
    for address in ("rollouts", "rollouts/70/0"):
        assert "secret" not in page(gate, f"/runs/{run}/{address}", key=key, status=404)


@pytest.mark.parametrize("address", ["rollouts/1/999", "rollouts/999/0", "rollouts/-1/0"])
def test_a_missing_rollout_is_a_sentence(gate, run, address):
    assert "cannot be shown" in page(gate, f"/runs/{run}/{address}", status=400)


def test_without_the_models_tokenizer_tokens_are_ids(gate, send, run, monkeypatch):
    send("ids", 80, {"answer": "x", "tokens": [65, 66]})
    gate.run(gate.gateway.models.remove("speaker"))
    shown = page(gate, f"/runs/{run}/rollouts/80/0")
    assert re.findall(r'class="token "[^>]*>([^<]*)<', shown) == ["65 ", "66 "]
