"""FastAPI's page of the routes in a real browser."""

from __future__ import annotations

import pytest
from playwright.sync_api import sync_playwright

from tests.support.browser import CHROMIUM
from tests.support.gateway.running import KEY, running_gateway

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="Debian's chromium is not installed"),
]


def test_the_page_sends_a_request_and_asks_no_other_server(tmp_path):
    with running_gateway(tmp_path) as gate, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        said, asked = [], []
        page.on("console", lambda it: said.append(it.text) if it.type == "error" else None)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{gate.url}/docs")
        page.fill("input[name=key]", KEY)
        page.press("input[name=key]", "Enter")
        page.wait_for_url("**/docs")
        page.click(".authorize")
        page.fill("#api_key_value", KEY)
        page.click("[aria-label='Apply credentials'] >> nth=0")
        page.click(".btn-done")
        route = page.locator("#operations-Tandem-get_version")
        route.click()
        route.locator(".try-out__btn").click()
        route.locator(".execute").click()
        answer = route.locator(".live-responses-table")
        assert '"version"' in answer.inner_text(timeout=60_000)
        assert said == []
        assert all(url.startswith((gate.url, "data:")) for url in asked)
        browser.close()
