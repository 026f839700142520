"""Recorded requests of clients, with their outcomes in a gateway.

`NAME.jsonl` has a request on each line, with its status and the outcome of its future.
`NAME.workers.jsonl` has the workers of these requests: their specifications without secrets and
random ids, and their pods. Each is the difference from the first of its kind."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.workers.launchers.kubernetes.home import Home
from gateway.workers.launchers.kubernetes.maker import WorkerMaker
from gateway.workers.launchers.kubernetes.names import COMPONENT
from gateway.workers.launchers.kubernetes.resources import pod_request
from tandem.protocol.authority import Authority
from tandem.protocol.worker import WorkerSpec
from tandem.settings.cluster import ClaimPoolSettings, KubernetesSettings
from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.gateway.running import KEY, Gate, running_gateway

_ROOT = Path(__file__).parents[3]
FOLDER = _ROOT / "tests" / "golden" / "requests"
CHANGELOG = _ROOT / "CHANGELOG.md"

_GPUS = {"device_class": "gpu.nvidia.com", "devices": 2, "awake": 2, "memory_bytes": 80 * 2**30}
_POOLS = [
    ClaimPoolSettings(name="train", roles=["trainer"], claims=4, nodes=2, **_GPUS),
    ClaimPoolSettings(name="serve", roles=["sampler"], claims=4, **_GPUS),
]
_NOT_REPEATED = ("/telemetry", "/session_heartbeat", "/retrieve_future", "/healthz")
"""Paths that a client calls at no fixed moment."""
_SESSION = re.compile(rb"s-(?!0000)[0-9a-f]{12}")
_OWN = b"s-000000000000"
"""In place of sessions that the gateway makes: for engines of a base model, and for jobs."""
_RANDOM = re.compile(r"(?<=s-\d{12})-[0-9a-f]{8}|(?<=s-\d{12}-train-0)-[0-9a-f]{10}")
"""The end of a worker's id, and that of the name of a pod that checks a job."""
_LARGEST_SEED = 1000
"""Larger ones were drawn."""
_SECRET_FIELDS = {"secret", "tls", "lease"}


@contextmanager
def replaying_gateway() -> Iterator[Gate]:
    """A gateway whose workers would be pods."""
    cluster = KubernetesSettings(
        namespace="rl", trainer_image="trainer:1", sampler_image="sampler:1"
    )
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_LAUNCHER", "kubernetes")  # the argument is the fake's
        folder = Path(name)
        Authority.create(folder / "tls")
        prepare = partial(_prepare, pools=_POOLS)
        with running_gateway(
            folder,
            launcher=FakeLauncher(prepare=prepare),
            kubernetes=cluster.model_dump(),
            tls_dir=folder / "tls",
            claim_pools=[each.model_dump() for each in _POOLS],
            operation_timeout=600.0,
        ) as gate:
            yield gate


def _prepare(request: Any, needs: Any, *, pools: list[ClaimPoolSettings]) -> Any:
    return pod_request(request, needs, pools)


# --- Recording ------------------------------------------------------------------------------------


class Recorder:
    """Notes all requests of httpx in this process. Sessions get numbers for their random ids."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self._sessions: dict[bytes, bytes] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        recorder = self
        with pytest.MonkeyPatch.context() as patch:
            synchronous, asynchronous = httpx.Client.send, httpx.AsyncClient.send

            def send(client: httpx.Client, request: httpx.Request, **options: Any) -> Any:
                recorder.note(request)
                return synchronous(client, request, **options)

            async def asend(client: httpx.AsyncClient, request: httpx.Request, **options: Any):
                recorder.note(request)
                return await asynchronous(client, request, **options)

            patch.setattr(httpx.Client, "send", send)
            patch.setattr(httpx.AsyncClient, "send", asend)
            yield

    def note(self, request: httpx.Request) -> None:
        path = request.url.raw_path
        if request.url.path.endswith(_NOT_REPEATED):
            return
        body = self._numbered(request.content)
        line: dict[str, Any] = {"send": f"{request.method} {self._numbered(path).decode()}"}
        if "json" in request.headers.get("content-type", ""):
            line["json"] = json.loads(body)
        elif body:
            line["bytes"] = base64.b64encode(body).decode()
            line["type"] = request.headers["content-type"]
        self.lines.append(line)

    def _numbered(self, text: bytes) -> bytes:
        return _SESSION.sub(lambda found: self._number(found[0]), text)

    def _number(self, session: bytes) -> bytes:
        if session not in self._sessions:
            self._sessions[session] = b"s-%012d" % (len(self._sessions) + 1)
        return self._sessions[session]


# --- Replaying ------------------------------------------------------------------------------------


class Replay:
    """`lines` are requests with their statuses. The gateway may still start workers for them."""

    def __init__(self, gate: Gate, lines: list[dict[str, Any]]) -> None:
        self._gate = gate
        self._sessions: dict[bytes, bytes] = {}
        with httpx.Client(
            base_url=gate.url, headers={"X-API-Key": KEY}, timeout=60, verify=False
        ) as client:
            self.lines = [self._repeat(client, line) for line in lines]

    def workers(self) -> list[dict[str, Any]]:
        """Return the specifications and pods of the workers so far."""
        return [*self._specs(), *self._pods()]

    def _repeat(self, client: httpx.Client, line: dict[str, Any]) -> dict[str, Any]:
        method, path = self._renamed(line["send"].encode()).decode().split()
        sent = {name: line[name] for name in ("send", "json", "bytes", "type") if name in line}
        content = json.dumps(line["json"]).encode() if "json" in line else b""
        media = line.get("type", "application/json")
        if "bytes" in line:
            content = base64.b64decode(line["bytes"])
        answer = client.request(
            method, path, content=self._renamed(content), headers={"Content-Type": media}
        )
        sent["status"] = answer.status_code
        told = answer.json() if "json" in answer.headers.get("content-type", "") else {}
        if not isinstance(told, dict):
            return sent
        if path.endswith("/create_session") and answer.is_success:
            number = b"s-%012d" % (len(self._sessions) + 1)
            self._sessions[number] = told["session_id"].encode()
        if request_id := told.get("request_id"):
            told = _json_of(self._gate.retrieve(request_id))
            sent["result"] = "error" if "error" in told else "ok"
        if "type" in told and "error" in told:
            sent["error"] = told["type"]
        return sent

    def _renamed(self, text: bytes) -> bytes:
        for number, session in self._sessions.items():
            text = text.replace(number, session)
        return text

    def _plain(self, value: object) -> Any:
        """Return JSON with numbers for random ids, and without this machine's folders."""
        text = json.dumps(value, sort_keys=True)
        for number, session in self._sessions.items():
            text = text.replace(session.decode(), number.decode())
        text = _SESSION.sub(_OWN, text.encode()).decode()
        text = text.replace(str(self._gate.settings.data_dir), "/data")
        text = text.replace(str(self._gate.settings.data_dir.parent), "")
        text = text.replace(sys.prefix, "/venv").replace(str(_ROOT), "/tandem")
        return json.loads(_RANDOM.sub("", text))

    def _specs(self) -> list[dict[str, Any]]:
        found = [self._plain(_public(spec)) for spec in self._gate.launcher.specs]
        return _differences("worker", found, kind=lambda each: each["kind"])

    def _pods(self) -> list[dict[str, Any]]:
        settings = self._gate.settings
        volume = settings.data_dir
        home = Home(settings=settings.kubernetes, namespace="rl", volume=volume, epoch=1)
        maker = WorkerMaker(settings, Authority.read(settings.tls_dir), home)
        launcher = self._gate.launcher
        made = [pod for spec in launcher.specs for pod in maker.make(spec)[1].pods]
        made += [maker.make_preflight(needs) for needs in launcher.preflights]
        found = [self._plain(pod) for pod in made]
        return _differences("pod", found, kind=lambda each: each["metadata"]["labels"][COMPONENT])


def _differences(
    title: str, found: list[dict[str, Any]], *, kind: Callable[[dict[str, Any]], str]
) -> list[dict[str, Any]]:
    first: dict[str, Any] = {}
    lines = []
    for each in sorted(found, key=lambda each: (kind(each), json.dumps(each))):
        base = first.setdefault(kind(each), each)
        lines.append({title: each if base is each else difference(base, each)})
    return lines


def _json_of(answer: httpx.Response) -> dict[str, Any]:
    return answer.json() if "json" in answer.headers.get("content-type", "") else {}


def _public(spec: WorkerSpec) -> dict[str, Any]:
    public = spec.model_dump(mode="json", exclude=_SECRET_FIELDS, exclude_none=True)
    lora = public.get("training", {}).get("lora", {})
    if lora.get("seed", 0) > _LARGEST_SEED:
        del lora["seed"]
    return public


def difference(base: Any, other: Any) -> Any:
    """Return the changed fields of an object. A field that `other` lacks is null."""
    if isinstance(base, dict) and isinstance(other, dict):
        names = sorted({*base, *other})
        return {
            name: difference(base.get(name), other.get(name))
            for name in names
            if base.get(name) != other.get(name)
        }
    if isinstance(base, list) and isinstance(other, list) and len(base) == len(other):
        return {
            str(number): difference(*pair)
            for number, pair in enumerate(zip(base, other, strict=True))
            if pair[0] != pair[1]
        }
    return other


# --- Files ----------------------------------------------------------------------------------------


def names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.jsonl") if ".workers" not in file.name)


def read_lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def write_lines(name: str, lines: list[dict[str, Any]]) -> None:
    FOLDER.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (FOLDER / f"{name}.jsonl").write_text(text)


def fingerprint() -> str:
    """Return eight digits that change with each line of the recordings."""
    files = sorted(FOLDER.glob("*.jsonl"))
    whole = hashlib.sha256()
    for file in files:
        whole.update(file.name.encode() + b"\0" + file.read_bytes())
    return whole.hexdigest()[:8]
