"""A port of this machine that kubectl forwards to the serving gateway."""

from __future__ import annotations

import subprocess
import threading
import time

import httpx

from tests.cluster.kubectl import Kubectl
from tests.support.ports import known_port

_PAUSE = 0.5
_PATIENCE = 10.0
"""Seconds without an answer. The loss of a node does not close its connections."""


class PortForward:
    """`kubectl port-forward` to the Service, and so to the leader. It starts again when the leader
    changes."""

    def __init__(self, kubectl: Kubectl) -> None:
        port = known_port()
        self.url = f"http://127.0.0.1:{port}"
        forward = ("port-forward", "service/tandem", f"{port}:8000")
        self._command = ("kubectl", "--namespace", kubectl.namespace, *forward)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> PortForward:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(30)

    def serves(self) -> bool:
        """Whether a leader answers."""
        try:
            return httpx.get(f"{self.url}/api/v1/readyz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def _keep(self) -> None:
        while not self._closed.wait(_PAUSE):
            quiet = subprocess.DEVNULL
            process = subprocess.Popen(self._command, stdout=quiet, stderr=quiet)
            self._watch(process)
            process.kill()
            process.wait()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        answered = time.monotonic()
        while process.poll() is None and time.monotonic() - answered < _PATIENCE:
            if self._closed.wait(_PAUSE):
                return
            if self.serves():
                answered = time.monotonic()
