"""The pages of runs in a real browser: sign-in, live curves, a restart, comparison."""

from __future__ import annotations

import json
import re
import time

import pytest
from playwright.sync_api import expect, sync_playwright

from gateway.runs.record.progress import MetricsRow
from tandem.protocol.sign_in_code import make_code
from tests.support.browser import CHROMIUM
from tests.support.gateway.browsers import log, new_run
from tests.support.gateway.running import KEY, running_gateway

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="Debian's chromium is not installed"),
]

HOSTILE = "<script>window.hacked = 1</script>"


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(chromium):
    """A page that may say nothing on the console, and ask only its own server."""
    context = chromium.new_context()
    page = context.new_page()
    page.said, page.asked = [], []
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.on("console", lambda it: page.said.append(it.text) if it.type == "error" else None)
    page.on("request", lambda request: page.asked.append(request.url))
    yield page
    context.close()


def rows(steps: range) -> list[MetricsRow]:
    return [MetricsRow(step, {"reward": step / 10, HOSTILE: 1.0}, 1.0 + step) for step in steps]


def test_a_run_is_watched_compared_and_stopped_in_a_browser(page, tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate:
        runs = [new_run(gate, f"{HOSTILE} {lr}", config=json.dumps({"lr": lr})) for lr in (1, 2)]
        for run in runs:
            gate.run(gate.gateway.record.append_metrics(run, rows(range(3)), "user"))
        page.goto(f"{gate.url}/sign-in#code={make_code(KEY, now=time.time())}")
        expect(page.get_by_role("heading", name="Runs")).to_be_visible()
        assert "code=" not in page.url

        page.get_by_role("searchbox", name="Name").fill("nothing like it")
        expect(page.get_by_text("No run fits.")).to_be_visible()
        page.get_by_role("searchbox", name="Name").fill("hacked")
        expect(page.locator("tr[data-live]")).to_have_count(2)
        log(gate, runs[0], step=3, reward=0.875)
        expect(page.get_by_text("0.875")).to_be_visible()

        for box in page.locator(".pick input").all():
            box.check()
        page.get_by_role("button", name="Compare 2 runs").click()
        expect(page.locator("figure canvas")).to_have_count(2)
        expect(page.get_by_role("rowheader", name="lr")).to_be_visible()

        page.goto(f"{gate.url}/runs/{runs[0]}")
        reward = page.locator('figure[data-name="reward"]')
        expect(reward.locator("canvas")).to_be_visible()
        log(gate, runs[0], step=4, reward=0.625)
        expect(reward.locator(".last")).to_have_text("0.625")
        page.get_by_label("Log scale").check()
        page.get_by_role("combobox", name="Over").select_option("at")
        expect(reward.locator("canvas")).to_be_visible()

        page.get_by_text("Stop …").click()
        page.get_by_label("Save no checkpoint").check()
        page.get_by_role("button", name="Stop the run").click()
        expect(page.get_by_text(re.compile("has stopped the run")).first).to_be_visible()
        assert page.evaluate("window.hacked") is None
        assert page.said == []
        assert all(url.startswith((gate.url, "data:")) for url in page.asked)


def test_a_page_says_that_its_gateway_is_away_and_goes_on_with_the_next(page, tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate:
        port = gate.server.servers[0].sockets[0].getsockname()[1]
        run = new_run(gate, "goes on")
        log(gate, run, reward=0.5)
        page.goto(f"{gate.url}/sign-in#code={make_code(KEY, now=time.time())}")
        page.get_by_role("link", name="goes on").click()
        last = page.locator('figure[data-name="reward"] .last')
        expect(page.locator("figure canvas")).to_be_visible()
        assert page.locator("#connection").is_hidden()
    expect(page.locator("#connection")).to_contain_text("The gateway does not answer")
    expect(last).to_have_text("0.5")
    with running_gateway(tmp_path, session_ttl=600, port=port) as gate:
        log(gate, run, step=1, reward=0.75)
        expect(last).to_have_text("0.75", timeout=30_000)
        expect(page.locator("#connection")).to_be_hidden()


def test_without_javascript_everything_can_be_read(chromium, tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate:
        run = new_run(gate, "plain", config='{"lr": 0.5}')
        gate.run(gate.gateway.record.append_metrics(run, rows(range(3)), "user"))
        context = chromium.new_context(java_script_enabled=False)
        page = context.new_page()
        page.goto(gate.url)
        page.get_by_label("API key").fill(KEY)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("searchbox", name="Name").fill("plain")
        page.get_by_role("button", name="Show").click()
        page.get_by_role("link", name="plain").click()
        expect(page.get_by_role("img", name="reward: 0.2 at step 2")).to_be_visible()
        expect(page.get_by_role("rowheader", name="lr")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        context.close()
