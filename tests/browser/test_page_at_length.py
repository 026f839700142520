"""The pages of runs under load, and for everybody: 1,000 runs, 10,000 live rows, axe."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Page, expect, sync_playwright
from sqlalchemy import insert, select

from gateway.api.pages import live
from gateway.runs.record.progress import MetricsRow
from gateway.storage.tables import runs
from tandem.protocol.sign_in_code import make_code
from tests.support.browser import CHROMIUM
from tests.support.gateway.browsers import log, new_run
from tests.support.gateway.running import KEY, Gate, running_gateway

AXE = Path(sys.prefix) / "axe" / "axe.min.js"
UPDATES = 10_000

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="Debian's chromium is not installed"),
]


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def sign_in(page: Page, gate: Gate) -> None:
    page.goto(f"{gate.url}/sign-in#code={make_code(KEY, now=time.time())}")
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()


async def add_past_runs(gate: Gate, like: str, count: int) -> None:
    database = gate.gateway.database
    (row,) = await database.read(select(runs).where(runs.c.id == like))
    copies = [
        {
            **row,
            "id": f"s-past:train:{n}",
            "name": f"past-{n:04}",
            "state": "ended",
            "created_at": n,
        }
        for n in range(count)
    ]
    for start in range(0, count, 100):
        await database.write(insert(runs), *copies[start : start + 100])


@pytest.mark.skipif(not AXE.exists(), reason="scripts/axe.sh has not run")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_no_page_has_a_serious_fault_for_people_with_impairments(chromium, tmp_path, scheme, width):
    with running_gateway(tmp_path, session_ttl=600) as gate:
        ids = [new_run(gate, f"run {n}", tags="a", config=json.dumps({"n": n})) for n in (1, 2)]
        for run in ids:
            for step in range(3):
                log(gate, run, step=step, reward=step)
                shares = dict.fromkeys(("compute", "samples"), 0.5)
                named = {f"tandem__seconds__{share}": value for share, value in shares.items()}
                log(gate, run, "tandem", step=step, tandem__kl_mean=0.1, **named)
        rollouts = [{"prompt": "p", "answer": "a", "reward": 1.0}]
        gate.run(gate.gateway.record.append_rollouts(ids[0], "b", 1, rollouts))
        context = chromium.new_context(
            color_scheme=scheme, viewport={"width": width, "height": 800}, bypass_csp=True
        )
        page = context.new_page()
        paths = [
            "/",
            f"/runs/{ids[0]}",
            f"/runs/{ids[0]}/logs",
            f"/runs/{ids[0]}/rollouts",
            f"/compare?run={ids[0]}&run={ids[1]}",
            "/devices",
            "/chat",
            "/nowhere",
        ]
        page.goto(f"{gate.url}/sign-in")
        faults = found_by_axe(page)
        sign_in(page, gate)
        for path in paths:
            page.goto(gate.url + path)
            faults += found_by_axe(page)
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{path} scrolls sideways by {wide} pixels"
        context.close()
    assert faults == []


def found_by_axe(page: Page) -> list[str]:
    """Return the serious faults of the page, each with its element."""
    page.add_script_tag(path=AXE)
    violations = page.evaluate("axe.run().then((found) => found.violations)")
    return [
        f"{page.url}: {each['id']}: {node['html'][:200]}"
        for each in violations
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


def test_a_thousand_runs_scroll(chromium, tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate:
        gate.run(add_past_runs(gate, new_run(gate, "first"), 1000))
        page = chromium.new_page()
        sign_in(page, gate)
        rows = page.locator("tr[id^='run-']")
        while not page.get_by_role("link", name="past-0000", exact=True).count():
            shown = rows.count()
            page.keyboard.press("End")
            expect(rows.nth(shown)).to_be_attached()
        assert rows.count() == 1001
        page.close()


def test_ten_thousand_live_rows_leave_the_memory_of_page_and_gateway_flat(
    chromium, tmp_path, monkeypatch
):
    monkeypatch.setattr(live, "PERIOD", 0.001)
    with running_gateway(tmp_path, session_ttl=600) as gate:
        run = new_run(gate, "long")
        log(gate, run, step=0, reward=0.0)
        page = chromium.new_page()
        sign_in(page, gate)
        page.goto(f"{gate.url}/runs/{run}")
        expect(page.locator("figure canvas")).to_be_visible()

        async def write(first: int, end: int) -> None:
            for step in range(first, end):
                rows = [MetricsRow(step, {"reward": step / UPDATES}, time.time())]
                await gate.gateway.record.append_metrics(run, rows, "user")
                await asyncio.sleep(0.001)

        tools = page.context.new_cdp_session(page)
        tools.send("HeapProfiler.enable")
        sizes = []
        quarter = UPDATES // 4
        for part in range(4):
            for first in range(part * quarter, (part + 1) * quarter, 250):
                gate.run(write(first + 1, first + 251))
            last = page.locator('figure[data-name="reward"] .last')
            expect(last).to_have_text(str((part + 1) / 4).rstrip("0").rstrip("."))
            tools.send("HeapProfiler.collectGarbage")
            page_bytes = page.evaluate("performance.memory.usedJSHeapSize")
            sizes.append((page_bytes, psutil.Process().memory_info().rss))
        page.close()
    assert sizes[-1][0] <= 1.1 * sizes[1][0], sizes
    assert sizes[-1][1] <= 1.1 * sizes[1][1], sizes
