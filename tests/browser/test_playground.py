"""The playground in a real browser: pick, tune and chat, the queue, the time, the switch.

A thread trains in place of a runner, with the SDK and the key of its claim."""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager

import pytest
from playwright.sync_api import expect, sync_playwright

from tandem.settings.playground import PlaygroundSettings
from tests.support.browser import CHROMIUM
from tests.support.gateway.browsers import log
from tests.support.gateway.running import KEY
from tests.support.gateway.speaking_models import speaking_gateway
from tests.support.gateway.visitors import (
    PlaygroundClock,
    ask,
    claimed,
    key_of,
    started,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="Debian's chromium is not installed"),
]

TRIALS = re.compile(r"/playground/trials/trial-\w+$")


@pytest.fixture
def gate(tmp_path):
    with speaking_gateway(tmp_path, session_ttl=600, playground=PlaygroundSettings(runs=1)) as gate:
        yield gate


@pytest.fixture
def sign_in(gate):
    """Opens a browser of an owner. It may say nothing on its console, and ask only the gateway."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        said, asked = [], []

        def page_of(key: str, *, scripts: bool = True):
            page = browser.new_context(java_script_enabled=scripts).new_page()
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("console", lambda it: said.append(it.text) if it.type == "error" else None)
            page.on("request", lambda request: asked.append(request.url))
            page.goto(f"{gate.url}/sign-in?next=/playground")
            page.get_by_label("API key").fill(key)
            page.get_by_role("button", name="Sign in").click()
            return page

        yield page_of
        browser.close()
    refused = ("status of 403", "status of 404", "status of 429")
    assert [each for each in said if not any(status in each for status in refused)] == []
    assert all(url.startswith((gate.url, "data:")) for url in asked)


@contextmanager
def trained(gate, go_on: threading.Event):
    """Train the next trial in a thread. It saves its weights when it may `go_on`."""
    claim = claimed(gate)

    def train() -> None:
        with claim.program() as service:
            training = service.create_lora_training_client("speaker", rank=8).result()
            for step in range(3):
                log(gate, training.model_id, step=step, reward=step / 4)
            assert go_on.wait(60)
            weights = training.save_weights_for_sampler("tuned").result().path
        claim.end(
            numbers={"last reward": 0.95, "greedy": 0.5},
            weights=weights,
            violations={"greedy": "0.5, and at least 0.9 is expected"},
        )

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        go_on.set()
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no scripts"])
def test_a_visitor_picks_a_blueprint_tunes_a_model_and_chats_with_it(gate, sign_in, scripts):
    page, go_on = sign_in(key_of(gate, "ann"), scripts=scripts), threading.Event()

    def now(text: str) -> None:
        if not scripts:
            page.reload()
        expect(page.get_by_role("status").filter(has_text=text)).to_be_visible()

    card = page.get_by_role("region", name="GRPO on arithmetic")
    card.get_by_text("Choose and start").click()
    card.get_by_label("Base model").select_option("speaker")
    card.get_by_label("steps", exact=True).fill("7")
    card.get_by_label("objective").select_option("rloo")
    card.get_by_role("button", name="Start").click()
    expect(page).to_have_url(TRIALS)
    now("Number 1 in the queue.")
    trial = page.url
    with trained(gate, go_on):
        now("A model is in training.")
        if scripts:
            expect(page.get_by_role("img", name="reward: 0.5 at step 2")).to_be_visible()
    now("The tuned model is ready.")
    expect(page.get_by_role("row", name="greedy")).to_contain_text("at least 0.9 is expected")
    expect(page.get_by_text("kind: InferenceService")).to_be_visible()

    page.get_by_role("link", name="Chat, base beside tuned").click()
    expect(page.locator("[name=model]")).to_have_value("speaker")
    expect(page.locator("[name=model2]")).to_have_value(re.compile("^tinker://.*/tuned$"))
    page.get_by_text("Sampling").click()
    page.get_by_label("Most tokens").fill("20")
    page.get_by_label("Message", exact=True).fill("hi")
    page.get_by_role("button", name="Send").click()
    # The fake engine says the prompt backwards.
    expect(page.locator(".turn.assistant .text")).to_have_text(["ih", "ih"], timeout=30_000)

    page.goto(trial)
    page.get_by_role("link", name="Download").click()
    expect(page.get_by_role("heading", name="Files")).to_be_visible()
    page.goto(trial)
    page.get_by_text("End …").click()
    page.get_by_role("button", name="End the trial").click()
    expect(page.get_by_text("Ann ended it.")).to_be_visible()
    expect(page.get_by_role("link", name="Chat, base beside tuned")).to_have_count(0)


def test_one_visitor_cannot_open_the_trial_of_another(gate, sign_in):
    _, mine = started(gate, "ann")
    page = sign_in(key_of(gate, "ben"))
    page.goto(f"{gate.url}/playground/trials/{mine}")
    expect(page.get_by_role("heading", name="This page cannot be shown")).to_be_visible()


def test_the_place_in_the_queue_is_shown_and_moves_up(gate, sign_in):
    _, first = started(gate, "ann")
    key, second = started(gate, "ben")
    page = sign_in(key)
    expect(page.get_by_text("is number 2 in the queue.")).to_be_visible()
    card = page.get_by_role("region", name="GRPO on arithmetic")
    card.get_by_text("Choose and start").click()
    card.get_by_label("seed").fill("5")
    card.get_by_role("button", name="Start").click()
    expect(page.get_by_role("alert")).to_contain_text(f"You have the trial {second} already")
    expect(page.get_by_role("alert")).to_contain_text("number 2 in the queue")
    expect(card.get_by_label("seed")).to_have_value("5")
    page.get_by_role("link", name="grpo-arithmetic").click()
    expect(page.get_by_role("status").filter(has_text="Number 2 in the queue.")).to_be_visible()
    ask(gate, "POST", f"/trials/{first}/end")
    expect(page.get_by_role("status").filter(has_text="Number 1 in the queue.")).to_be_visible()


def test_the_page_tells_by_itself_that_the_time_is_over(gate, sign_in):
    clock = PlaygroundClock(gate)
    key, mine = started(gate, "ann")
    page = sign_in(key)
    page.goto(f"{gate.url}/playground/trials/{mine}")
    claimed(gate)
    expect(page.get_by_role("status").filter(has_text="A model is in training.")).to_be_visible()
    expect(page.get_by_text("End …")).to_be_visible()
    clock.passes(3600)
    expect(page.get_by_text("Its time is over: 60 minutes.")).to_be_visible()
    expect(page.get_by_role("status").filter(has_text="The trial has ended.")).to_be_visible()
    expect(page.get_by_text("End …")).to_be_hidden()


def test_the_switch_closes_the_playground_for_visitors(gate, sign_in):
    visitor, admin = sign_in(key_of(gate, "ann")), sign_in(KEY)
    expect(visitor.get_by_text("Choose a blueprint, tune a model with it")).to_be_visible()
    admin.get_by_role("button", name="Close the playground").click()
    expect(admin.get_by_role("button", name="Open the playground")).to_be_visible()
    expect(visitor.get_by_text("No trial starts now. Come back later.")).to_be_visible()
    card = visitor.get_by_role("region", name="GRPO on arithmetic")
    card.get_by_text("Choose and start").click()
    card.get_by_role("button", name="Start").click()
    expect(visitor.get_by_role("alert")).to_contain_text("The playground is closed for now")
    started_at = gate.gateway.playground.all()
    assert started_at == []
    admin.get_by_role("button", name="Open the playground").click()
    expect(admin.get_by_role("button", name="Close the playground")).to_be_visible()


def test_the_staff_ends_a_trial_of_the_table(gate, sign_in):
    started(gate, "ann")
    page = sign_in(key_of(gate, "max", "maintainer"))
    page.get_by_role("button", name="End the trial of ann").click()
    expect(page.get_by_role("button", name="End the trial of ann")).to_have_count(0)
    assert [each.state for each in gate.gateway.playground.all()] in ([], ["ending"])
