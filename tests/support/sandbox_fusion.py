"""A stand-in for SandboxFusion: runs Python programs that are posted to its address."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@contextmanager
def sandbox_fusion() -> Iterator[tuple[str, list[str]]]:
    """Yield the address, for `SANDBOX_URL`, and the statuses of the programs that have run."""
    statuses: list[str] = []

    class Runner(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = json.dumps(_run(asked)).encode()
            statuses.append(json.loads(answer)["status"])
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Runner)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/run_code", statuses
    finally:
        server.shutdown()
        server.server_close()


def _run(asked: dict) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in asked.get("files", {}).items():
            Path(folder, name).write_bytes(base64.b64decode(content))
        command = [sys.executable, "-I", "-c", asked["code"]]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=asked["run_timeout"]
            )
        except subprocess.TimeoutExpired:
            return {"status": "Failed", "message": "timeout", "run_result": None}
    result = {"stdout": done.stdout, "stderr": done.stderr, "return_code": done.returncode}
    return {"status": "Failed" if done.returncode else "Success", "run_result": result}
