"""A visitor tunes a tiny model in a real browser on the real stack, with a real runner."""

from __future__ import annotations

import re
import threading

import pytest
from playwright.sync_api import expect, sync_playwright

from tandem.blueprints.runner import BlueprintRunner
from tandem.demo.tiny_model import write_tiny_model
from tests.support.browser import CHROMIUM
from tests.support.stacks import running

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not CHROMIUM.exists(), reason="Debian's chromium is not installed"),
]

_TRAINING, _CHAT = 400_000, 200_000
"""Milliseconds."""


def test_a_visitor_tunes_a_real_model_and_chats_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_PLAYGROUND_RUNS", "1")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    write_tiny_model(tmp_path / "chat", seed=0, tokenizer="qwen")
    settings = {"trainer_ranks": "1", "sampler_kv_cache_bytes": str(2**28)}
    models = {"my/chat": tmp_path / "chat"}
    with running(tmp_path / "data", models=models, settings=settings) as stack:
        url, admin = stack.stack.endpoint.url, stack.stack.endpoint.api_key
        with stack.stack.client() as client:
            made = client.post("keys", json={"owner": "ann", "role": "member"}).json()
        runner, stop = BlueprintRunner(url=url, key=admin, slots=1, say=print), threading.Event()
        thread = threading.Thread(target=runner.run_trials, args=[stop])
        thread.start()
        try:
            _tune_and_chat(url, made["key"])
        finally:
            stop.set()
            thread.join(60)


def _tune_and_chat(url: str, key: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"{url}/sign-in?next=/playground")
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Sign in").click()
        card = page.get_by_role("region", name="DPO on preferences")
        card.get_by_text("Choose and start").click()
        card.get_by_role("button", name="Start").click()

        ready = page.get_by_role("status").filter(has_text="The tuned model is ready.")
        expect(ready).to_be_visible(timeout=_TRAINING)
        expect(page.get_by_role("row", name="margin")).to_contain_text("within")
        expect(page.get_by_role("img", name=re.compile("at step")).first).to_be_visible()
        expect(page.get_by_text("--enable-lora").first).to_be_visible()
        trial = page.url

        page.get_by_role("link", name="Chat, base beside tuned").click()
        page.get_by_text("Sampling").click()
        page.get_by_label("Most tokens").fill("8")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Message", exact=True).fill("2+3=")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".turn.assistant .tokens:visible")).to_have_count(2, timeout=_CHAT)
        expect(page.locator(".turn.assistant .version").last).to_have_text(re.compile(r"\S"))

        page.goto(trial)
        page.get_by_text("End …").click()
        page.get_by_role("button", name="End the trial").click()
        ended = page.get_by_role("status").filter(has_text="The trial has ended.")
        expect(ended).to_be_visible(timeout=_CHAT)
        browser.close()
