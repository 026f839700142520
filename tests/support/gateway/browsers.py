"""Browsers without a screen: clients with cookies that ask for HTML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from gateway.owners.auth.keys import NewKey, Role
from gateway.runs.record.progress import MetricsRow
from tests.support.gateway.running import KEY, Gate

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def browser(gate: Gate) -> httpx.Client:
    return httpx.Client(base_url=gate.url, headers=BROWSER, timeout=30, verify=False)


@contextmanager
def signed_in(gate: Gate, key: str = KEY) -> Iterator[httpx.Client]:
    with browser(gate) as client:
        assert sign_in(client, key).status_code == 303
        yield client


def sign_in(client: httpx.Client, key: str = KEY, **fields: str) -> httpx.Response:
    token = token_in(client.get("/sign-in"))
    return client.post("/sign-in", data={"form_token": token, "key": key, **fields})


def token_in(answer: httpx.Response) -> str:
    return re.search(r'name="form_token" value="(\w+)"', answer.text)[1]


def new_key(gate: Gate, role: Role = "member", owner: str = "ann") -> tuple[str, str]:
    """Return the id and the secret of a new key."""
    key, secret = gate.run(gate.gateway.keys.create(NewKey(owner=owner, role=role)))
    return key.id, secret


def new_run(gate: Gate, name: str = "", *, key: str = KEY, **metadata: str) -> str:
    """Create a run with a name and return its id."""
    with gate.http(key) as client:
        body = {
            "session_id": gate.session_id(key),
            "model_seq_id": 0,
            "base_model": "tiny:full",
            "user_metadata": {"name": name, **metadata},
        }
        made = client.post("/api/v1/create_model", json=body)
        assert made.status_code == 200, made.text
    gate.retrieve(made.json()["request_id"])
    return made.json()["model_id"]


def log(gate: Gate, run_id: str, source: str = "user", *, step: int = 0, **values: float) -> None:
    """Write a row of metrics. `tandem__x` stands for `tandem/x`."""
    named = {name.replace("__", "/"): value for name, value in values.items()}
    gate.run(gate.gateway.record.append_metrics(run_id, [MetricsRow(step, named, 1.0)], source))


def events(answer: httpx.Response) -> Iterator[tuple[str, dict]]:
    """Yield the kind and the content of each event of an open stream."""
    kind = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: ") or "{}")
