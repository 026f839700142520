"""Plain HTTP requests to a gateway under test."""

from __future__ import annotations

import httpx


def create_sampler(client: httpx.Client, session_id: str, number: int = 0, model: str = "tiny"):
    body = {"session_id": session_id, "sampling_session_seq_id": number, "base_model": model}
    return client.post("/api/v1/create_sampling_session", json=body)


def new_sampler(gate) -> str:
    """Return the id of a base model's sampling session, in a new session."""
    with gate.http() as client:
        return create_sampler(client, gate.session_id()).json()["sampling_session_id"]


def asample(client: httpx.Client, sampler_id: str | None, seq_id: int | None = 0, **changes):
    body = {
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 2},
    }
    return client.post("/api/v1/asample", json=body | changes)


def optim_step(client: httpx.Client, run_id: str, seq_id: int, **more: object):
    body = {"model_id": run_id, "seq_id": seq_id, "adam_params": {}}
    return client.post("/api/v1/optim_step", json=body | more)


def finish(client: httpx.Client, session_id: str, reason: str = "success"):
    body = {"reason": {"type": reason}}
    return client.post(f"/api/v1/sessions/{session_id}/finish", json=body)
