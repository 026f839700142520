"""Traces of a model that says whatever a test wants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai

from tests.support.gateway.running import Gate
from tests.support.gateway.speaking_models import (
    byte_tokenizer,
    chat,
    client_of,
    says,
    speaking_gateway,
    write_speaking_model,
)

USER = {"role": "user", "content": "hi"}
TRACES = "/api/tandem/v1/traces"


@contextmanager
def agent_gateway(folder: Path, **changes) -> Iterator[Gate]:
    """Run a gateway with `agent`, a model with a token per byte and a long window."""
    with speaking_gateway(folder, **changes) as gate:
        write_speaking_model(folder / "agent", byte_tokenizer(), window=4096)
        gate.run(gate.gateway.models.add(name="agent", path=str(folder / "agent")))
        chat(client_of(gate), model="agent", max_tokens=1)  # starts the engine
        yield gate


class Trace:
    def __init__(self, gate, **fields) -> None:
        self.gate = gate
        self.made = gate.http().post(TRACES, json={"model": "agent"} | fields).json()
        self.id, self.key = self.made["id"], self.made["key"]
        self.url = f"{TRACES}/{self.id}"
        self.client = openai.OpenAI(
            base_url=f"{self.made['base_url']}/v1", api_key=self.key, max_retries=0, timeout=30
        )

    def say(self, answer: str, *messages, end: bool = True, **changes):
        says(self.gate, answer, end=end)
        fields = {"model": "any", "messages": messages, "max_tokens": 32}
        return self.client.chat.completions.create(**(fields | changes))

    @property
    def sequences(self) -> list[dict]:
        return self.gate.http().get(self.url).json()["sequences"]


def text_of(sequence: dict) -> str:
    datum = sequence["datum"]
    tokens = [*datum["model_input"], datum["loss_fn_inputs"]["target_tokens"][-1]]
    return byte_tokenizer().decode(tokens, skip_special_tokens=False)


def sampled_of(sequence: dict) -> str:
    inputs = sequence["datum"]["loss_fn_inputs"]
    tokens = [t for t, m in zip(inputs["target_tokens"], inputs["mask"], strict=True) if m]
    return byte_tokenizer().decode(tokens, skip_special_tokens=False)
