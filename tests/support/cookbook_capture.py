"""Runs tinker-cookbook's capture proxy as a process, and reads its store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support.cookbook import SCRIPT, environment
from tests.support.ports import known_port
from tests.support.stacks import TestStack
from tests.support.waiting import wait_until


@dataclass(frozen=True)
class CaptureProxy:
    """Addresses of a proxy and of its store."""

    url: str
    store: str

    def address(self, run: str, trajectory: int) -> str:
        """Return the address under which requests are stored for this trajectory."""
        return f"{self.url}/r/run/{run}/traj/{trajectory}"

    def rows(self, run: str, count: int) -> list[dict]:
        """Wait until a run has `count` stored samples, and return them in their order."""

        def stored() -> list[dict]:
            answer = httpx.get(f"{self.store}/runs/{run}/rows").raise_for_status()
            rows = answer.json()["rows"]
            return rows if len(rows) >= count else []

        rows = wait_until(stored, what=f"the store has {count} samples")
        assert len(rows) == count
        return rows


@contextmanager
def capture_proxy(
    stack: TestStack, folder: Path, model: str, *, weights: str | None = None
) -> Iterator[CaptureProxy]:
    """Serve the model in `folder` of this name, or `weights` of it, with Qwen3's renderer."""
    port = known_port()
    data = folder / f"capture-{port}"
    command = [
        *(SCRIPT, "tinker_cookbook.capture.proxy.serve", "--port", str(port)),
        *("--base-model", model, "--renderer-name", "qwen3"),
        *("--store-data-dir", str(data), "--flush-interval-sec", "0.1"),
        *(("--model-path", weights) if weights else ()),
    ]
    log = folder / f"capture-{port}.log"
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(stack, folder), stdout=file, stderr=file
        )

        def listens() -> bool:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                return httpx.get(f"{url}/healthz").is_success
            except httpx.TransportError:
                return False

        try:
            wait_until(listens, what="the capture proxy listens")
            store = json.loads((data / "daemon.json").read_text())
            yield CaptureProxy(url=url, store=store["base_url"])
        finally:
            process.terminate()
            process.wait(timeout=60)
            # The store is another process, which would outlive the proxy for an hour.
            if (data / "daemon.json").exists():
                os.kill(json.loads((data / "daemon.json").read_text())["pid"], signal.SIGTERM)
