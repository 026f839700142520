"""A hub on loopback, for downloads with `huggingface_hub`. Large files come from another
address."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from tests.support.model_files import tensor_file

LARGE = (".safetensors", ".bin")
CONFIG = json.dumps({"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 64}).encode()


def shards(count: int = 2, size: int = 40_000) -> dict[str, bytes]:
    """Return the files of a model in several parts, without usable weights."""
    names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    index = {"weight_map": {f"layers.{number}": name for number, name in enumerate(names)}}
    return {
        "config.json": CONFIG,
        "tokenizer.json": b"{}",
        "LICENSE": b"free",
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{
            name: tensor_file(f"layers.{number}", size=size, fill=bytes([65 + number]))
            for number, name in enumerate(names)
        },
    }


@dataclass
class Hub:
    """The content and faults of the hub.

    `models` hold files by revision. A refusal is a part of the path, a status, an error code, and a
    count. `cuts` lists the bytes after which a file's connections break. `wrong` files differ from
    their listing. `token` is required."""

    url: str = ""
    models: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    refusals: list[tuple[str, int, str, int]] = field(default_factory=list)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    wrong: dict[str, bytes] = field(default_factory=dict)
    token: str = ""
    held: threading.Event = field(default_factory=threading.Event)
    holds: str = ""
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def add(self, name: str, files: dict[str, bytes], revision: str = "main") -> None:
        self.models.setdefault(name, {})[revision] = files

    def sent(self, name: str) -> list[str]:
        """Return the requested ranges of a file, "" for the whole."""
        return [
            headers.get("range", "")
            for method, path, headers in self.requests
            if method == "GET" and path.endswith(f"/{name}")
        ]

    def commit(self, name: str, revision: str) -> str:
        for known, files in self.models[name].items():
            digest = hashlib.sha1()
            for file in sorted(files):
                digest.update(file.encode() + files[file])
            if revision in (known, digest.hexdigest()):
                return digest.hexdigest()
        return ""

    def files(self, name: str, revision: str) -> dict[str, bytes]:
        return next(
            files
            for known, files in self.models[name].items()
            if self.commit(name, known) == self.commit(name, revision)
        )


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.held.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append(
            (self.command, path, {name.lower(): value for name, value in self.headers.items()})
        )
        for at, (text, status, code, times) in enumerate(hub.refusals):
            if text in path and times:
                hub.refusals[at] = (text, status, code, times - 1)
                return self._refuse(status, code)
        if found := re.fullmatch(r"/cdn/(\w+)/(.+?/.+?)/([^/]+)", path):
            commit, name, file = found.groups()
            return self._send_file(file, hub.files(name, commit)[file])
        if hub.token and self.headers.get("authorization") != f"Bearer {hub.token}":
            return self._refuse(401, "GatedRepo" if "/resolve/" in path else "")
        if found := re.fullmatch(r"/api/models/(.+?/.+?)/(revision|tree)/([^/]+)", path):
            name, what, revision = found.groups()
            if name not in hub.models:
                return self._refuse(404, "RepoNotFound")
            if not (commit := hub.commit(name, revision)):
                return self._refuse(404, "RevisionNotFound")
            entries = [_entry(file, data) for file, data in hub.files(name, commit).items()]
            if what == "tree":
                return self._send_json(entries)
            siblings = [{"rfilename": each["path"], "size": each["size"]} for each in entries]
            return self._send_json({"id": name, "sha": commit, "siblings": siblings})
        if found := re.fullmatch(r"/(.+?/.+?)/resolve/([^/]+)/(.+)", path):
            return self._resolve(*found.groups())
        return self._refuse(404, "RepoNotFound")

    def _resolve(self, name: str, commit: str, file: str) -> None:
        data = self.hub.files(name, commit)[file]
        if not file.endswith(LARGE):
            return self._send_file(
                file, data, {"ETag": f'"{_blob(data)}"', "X-Repo-Commit": commit}
            )
        port = urlsplit(self.hub.url).port
        self.send_response(302)
        for key, value in {
            "Location": f"http://localhost:{port}/cdn/{commit}/{name}/{file}",
            "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Linked-Size": str(len(data)),
            "X-Repo-Commit": commit,
            "Content-Length": "0",
        }.items():
            self.send_header(key, value)
        self.end_headers()

    def _send_file(self, file: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        hub = self.hub
        data = hub.wrong.get(file, data)
        whole, start = len(data), 0
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", "")):
            start = int(wanted[1])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{whole - 1}/{whole}")
        for key, value in {**(headers or {}), "Content-Length": str(whole - start)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        end = whole
        if hub.cuts.get(file):
            end = start + hub.cuts[file].pop(0)
        if hub.holds == file:
            self.wfile.write(data[start : start + 100])
            self.wfile.flush()
            hub.held.wait(60)
            return
        self.wfile.write(data[start:end])
        self.close_connection = end < whole

    def _send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(path: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {
        "type": "file",
        "path": path,
        "size": len(data),
        "oid": _blob(data),
    }
    if path.endswith(LARGE):
        sha256 = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": 130}
    return entry
