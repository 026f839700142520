"""Visitors of a gateway's playground, and runners that train nothing."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
import tinker

from gateway.owners.auth.keys import NewKey, Role
from tests.support.gateway.running import KEY, Gate

PLAYGROUND = "/api/tandem/v1/playground"
ASKED = {"blueprint": "grpo-arithmetic", "model": "tiny"}


class PlaygroundClock:
    """A playground's time, which only a test moves."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.now = gate, 1_000_000.0
        gate.gateway.playground.clock = gate.gateway.playground.monotonic = lambda: self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.gate.run(self.gate.gateway.playground.look_at_trials())


@dataclass
class ClaimedByTest:
    """A trial that a test claims in place of a runner."""

    gate: Gate
    trial: dict
    key: str

    @property
    def metadata(self) -> dict[str, str]:
        return {"tandem.blueprint": self.trial["blueprint"], "tandem.deadline": "600"}

    def program(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(
            self.metadata, self.trial["id"], base_url=self.gate.url, api_key=self.key
        )

    def end(self, **result: object) -> None:
        body = {"attempt": self.trial["attempt"], **result}
        answer = ask(self.gate, "POST", f"/claims/{self.trial['id']}/end", **body)
        assert answer.is_success, answer.text


def key_of(gate: Gate, owner: str, role: Role = "member") -> str:
    return gate.run(gate.gateway.keys.create(NewKey(owner=owner, role=role)))[1]


def ask(gate: Gate, method: str, path: str, key: str = KEY, **body: object) -> httpx.Response:
    with gate.http(key) as client:
        return client.request(method, f"{PLAYGROUND}{path}", json=body or None)


def started(gate: Gate, owner: str, **changes: object) -> tuple[str, str]:
    """Return the key of a new visitor, and the id of its trial."""
    key = key_of(gate, owner)
    answer = ask(gate, "POST", "/trials", key, **ASKED | changes)
    assert answer.status_code == 200, answer.text
    return key, answer.json()["id"]


def claimed(gate: Gate) -> ClaimedByTest:
    answer = ask(gate, "POST", "/claims")
    assert answer.status_code == 200, answer.text
    return ClaimedByTest(gate, **answer.json())


def saved_weights(claim: ClaimedByTest, *, model: str = "", rank: int = 0) -> str:
    """Train a step as a program does, and return the path of its checkpoint for sampling."""
    with claim.program() as service:
        name = model or claim.trial["model"]
        training = (
            service.create_lora_training_client(name, rank=rank)
            if rank
            else service.create_lora_training_client(f"{name}:full")
        ).result()
        return training.save_weights_for_sampler("final").result().path
