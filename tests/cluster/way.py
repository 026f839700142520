"""The way from here to the gateway that serves: a port of this machine, kept open by kubectl."""

from __future__ import annotations

import socket
import subprocess
import threading

import httpx

from tests.cluster.kubectl import Kubectl

_SERVING = "tandem.dev/serving=tandem"
_PAUSE = 0.5
_PATIENCE = 3
"""Answers in a row that may be missing: when a node is lost, nothing says that its pods are."""


class Way:
    """Follows the label `tandem.dev/serving` to another pod, as the Service does: what ends at the
    one that served is forwarded anew."""

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Way:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(60)

    def serves(self) -> bool:
        """Whether a gateway answers that does not stand by."""
        try:
            return httpx.get(f"{self.url}/api/v1/readyz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def _keep(self) -> None:
        while not self._closed.is_set():
            names = self._kubectl.run("get", "pod", "-l", _SERVING, "-o", "name").stdout.split()
            if names:
                self._forward(names[-1].decode())
            self._closed.wait(_PAUSE)

    def _forward(self, pod: str) -> None:
        command = ["kubectl", "--namespace", self._kubectl.namespace, "port-forward", pod]
        process = subprocess.Popen(
            [*command, f"{self._port}:8000"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        missing = 0
        while process.poll() is None and missing < _PATIENCE and not self._closed.is_set():
            missing = 0 if self.serves() else missing + 1
            self._closed.wait(_PAUSE)
        process.kill()
        process.wait()
