"""`make bench-page`: the page of a run in a browser beside a plain page, in turn in one run.

It measures the first paint of the runs' list, of a run's page and of a plain page of another
server, and the time from a click on a rollout to its tokens. It also measures the gateway's CPU
time with and without a watching page, while the run logs a row each second."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import psutil
import tinker
from playwright.sync_api import Page, sync_playwright

from benchmarks import record
from tandem.demo.tiny_model import write_tiny_model
from tandem.protocol.own_machine import without_proxies
from tandem.protocol.sign_in_code import make_code
from tandem.stack import Stack

MODEL = "bench/tiny"
STEPS, NAMES, TOKENS = 1000, 12, 300
_PLAIN = b"<!doctype html><title>plain</title><h1>A plain page</h1>"
_PAINT = """() => new Promise((done) => new PerformanceObserver((list) => {
  const found = list.getEntriesByName("first-contentful-paint")[0];
  if (found) done(found.startTime);
}).observe({ type: "paint", buffered: true }))"""
_DRILL = """(row) => new Promise((done) => {
  const began = performance.now();
  new MutationObserver(() => {
    if (row.querySelector(".token")) requestAnimationFrame(() => done(performance.now() - began));
  }).observe(row, { childList: true, subtree: true });
  row.querySelector("summary").click();
})"""


class _Plain(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(_PLAIN)))
        self.end_headers()
        self.wfile.write(_PLAIN)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _plain_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Plain) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def _fill(client: httpx.Client, run: str) -> None:
    """Log STEPS rows of NAMES metrics, and ten rollouts of TOKENS tokens."""
    for start in range(0, STEPS, 100):
        rows = [
            {
                "step": step,
                "values": {f"metric-{n}": math.sin(step / (n + 9)) for n in range(NAMES)},
            }
            for step in range(start, start + 100)
        ]
        client.post(f"runs/{run}/metrics", json={"rows": rows}).raise_for_status()
    rollout = {
        "prompt": "a question",
        "answer": "an answer",
        "reward": 0.5,
        "tokens": [n % 50 for n in range(TOKENS)],
        "logprobs": [-(n % 7) / 3 for n in range(TOKENS)],
    }
    body = {"batch": "bench", "step": 1, "rollouts": [rollout] * 10}
    client.post(f"runs/{run}/rollouts", json=body).raise_for_status()


def _paint(page: Page, address: str) -> float:
    page.goto(address)
    return float(page.evaluate(_PAINT))


def _drill(page: Page, address: str) -> float:
    page.goto(address)
    return float(page.evaluate(_DRILL, page.locator("details.one").first.element_handle()))


def _gateway_seconds(client: httpx.Client, run: str, pid: int, *, seconds: int) -> float:
    """Return the gateway's CPU seconds while the run logs a row each second."""
    gateway = psutil.Process(pid)
    before = gateway.cpu_times()
    for n in range(seconds):
        rows = [{"step": STEPS + n, "values": {"metric-0": 0.5}}]
        client.post(f"runs/{run}/metrics", json={"rows": rows})
        time.sleep(1)
    after = gateway.cpu_times()
    return (after.user - before.user) + (after.system - before.system)


def measure(*, rounds: int, watched_seconds: int) -> dict[str, object]:
    """Return milliseconds of each paint and drill-down, and the gateway's CPU seconds a second."""
    found: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as work,
        Stack(data_dir=Path(work) / "data", settings={"port": "0"}) as stack,
        _plain_server() as plain,
        without_proxies(),
    ):
        write_tiny_model(Path(work) / "tiny", seed=0)
        stack.add_model(name=MODEL, path=Path(work) / "tiny")
        endpoint = stack.endpoint
        with tinker.ServiceClient(base_url=endpoint.url, api_key=endpoint.api_key) as service:
            run = service.create_lora_training_client(f"{MODEL}:full").result().model_id
            with endpoint.client() as client, sync_playwright() as playwright:
                _fill(client, run)
                browser = playwright.chromium.launch(
                    executable_path="/usr/bin/chromium", args=["--no-sandbox"]
                )
                page = browser.new_page()
                code = make_code(endpoint.api_key, now=time.time())
                page.goto(f"{endpoint.url}/sign-in#code={code}")
                page.wait_for_url(f"{endpoint.url}/")
                pages: Mapping[str, str] = {
                    "a plain page": plain,
                    "the list": f"{endpoint.url}/",
                    "a run": f"{endpoint.url}/runs/{run}",
                }
                for number in range(rounds + 1):
                    for name, address in pages.items():
                        took = _paint(page, address)
                        if number:  # the first round fills the caches
                            found.setdefault(name, []).append(took)
                    took = _drill(page, f"{endpoint.url}/runs/{run}/rollouts")
                    if number:
                        found.setdefault("tokens of a rollout", []).append(took)
                page.goto("about:blank")
                alone = _gateway_seconds(client, run, endpoint.pid, seconds=watched_seconds)
                page.goto(f"{endpoint.url}/runs/{run}")
                watched = _gateway_seconds(client, run, endpoint.pid, seconds=watched_seconds)
                browser.close()
    return {
        "milliseconds": found,
        "gateway_cpu_share": {
            "alone": alone / watched_seconds,
            "watched": watched / watched_seconds,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-page")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--watched-seconds", type=int, default=30)
    given = parser.parse_args()
    found = measure(rounds=given.rounds, watched_seconds=given.watched_seconds)
    path = record.save({"benchmark": "page", "machine": record.machine(), **found})
    medians = {name: statistics.median(each) for name, each in found["milliseconds"].items()}  # type: ignore[attr-defined]
    for name, median in medians.items():
        print(f"{name}: median {median:.0f} ms")
    print(json.dumps(found["gateway_cpu_share"]))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
