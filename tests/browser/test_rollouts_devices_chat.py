"""Rollouts, devices and chat in a real browser, with and without scripts."""

from __future__ import annotations

import httpx
import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.support.browser import CHROMIUM
from tests.support.gateway.running import KEY
from tests.support.gateway.speaking_models import (
    byte_tokenizer,
    client_of,
    says,
    speaking_gateway,
)

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="Debian's chromium is not installed"),
]

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    with speaking_gateway(tmp_path_factory.mktemp("pages"), session_ttl=600) as gate:
        client_of(gate).completions.create(model="speaker", prompt="x")  # starts the engine
        yield gate


@pytest.fixture(scope="module")
def run(gate):
    tokens = byte_tokenizer().encode("the end", add_special_tokens=False).ids
    rollout = {
        "prompt": HOSTILE,
        "answer": "the end",
        "reward": 0.5,
        "tokens": tokens,
        "logprobs": [-5.0] * len(tokens),
    }
    with gate.service() as service, gate.http() as client:
        run = service.create_lora_training_client("speaker:full").result().model_id
        body = {"batch": "b", "step": 1, "rollouts": [rollout]}
        answer: httpx.Response = client.post(f"/api/tandem/v1/runs/{run}/rollouts", json=body)
        assert answer.is_success, answer.text
    return run


@pytest.fixture(params=[True, False], ids=["scripts", "no scripts"])
def scripts(request):
    return request.param


@pytest.fixture
def page(gate, scripts):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(java_script_enabled=scripts)
        page = context.new_page()
        faults, asked = [], []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda it: faults.append(it.text) if it.type == "error" else None)
        page.on("dialog", lambda dialog: faults.append(dialog.message))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{gate.url}/sign-in")
        page.fill("#key", KEY)
        page.click("button.primary")
        yield page
        assert faults == []
        assert all(url.startswith((gate.url, "data:")) for url in asked)
        browser.close()


def test_a_rollout_opens_and_its_tokens_get_colours(gate, run, page: Page, scripts):
    page.goto(f"{gate.url}/runs/{run}/rollouts")
    page.click("details.one > summary")
    if not scripts:
        page.click(".drawer > a")
    page.click("text=by logprob")
    expect(page.locator(".rollout .token.l6").first).to_be_visible()
    expect(page.locator(".rollout .token-text").first).to_have_text(HOSTILE)


def test_a_chat_answers_and_goes_on(gate, page: Page):
    says(gate, "<b>hello</b>")
    page.goto(f"{gate.url}/chat?model=speaker")
    page.click("summary")
    page.fill("[name=max_tokens]", "20")
    for count in (1, 2):
        page.fill("#message", "hi")
        page.click("text=Send")
        expect(page.locator(".turn.assistant .text")).to_have_text(["<b>hello</b>"] * count)
    page.locator("details.tokens summary").last.click()
    expect(page.locator(".turn .token").last).to_be_visible()


def test_the_devices_are_shown(gate, run, page: Page):
    page.goto(f"{gate.url}/devices")
    expect(page.locator(".lanes .bar").first).to_be_attached()
