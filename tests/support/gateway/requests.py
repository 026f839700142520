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


def create_run(
    client: httpx.Client,
    session_id: str,
    number: int = 0,
    model: str = "tiny:full",
    *,
    rank: int = 0,
    **asks: str,
):
    """Ask for a run with these `tandem.…` names. With a rank, it trains adapters of `tiny`."""
    body = {"session_id": session_id, "model_seq_id": number, "base_model": model}
    if rank:
        body |= {"base_model": "tiny", "lora_config": {"rank": rank}}
    if asks:
        body["user_metadata"] = {f"tandem.{name}": value for name, value in asks.items()}
    return client.post("/api/v1/create_model", json=body)


def retrieve_future(client: httpx.Client, request_id: str):
    return client.post("/api/v1/retrieve_future", json={"request_id": request_id})


def why_waiting(client: httpx.Client, request_id: str) -> str:
    answer = retrieve_future(client, request_id)
    assert answer.status_code == 408, answer.text
    return answer.json()["queue_state_reason"]


def optim_step(client: httpx.Client, run_id: str, seq_id: int, **more: object):
    body = {"model_id": run_id, "seq_id": seq_id, "adam_params": {}}
    return client.post("/api/v1/optim_step", json=body | more)


def finish(client: httpx.Client, session_id: str, reason: str = "success"):
    body = {"reason": {"type": reason}}
    return client.post(f"/api/v1/sessions/{session_id}/finish", json=body)
