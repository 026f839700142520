"""The cost of gateway and wire for an operation that does nothing.

It is an optim_step without gradients: two HTTP requests, one gRPC call, one commit."""

from __future__ import annotations

import statistics
import time

import httpx

from tandem.protocol.own_machine import http_client
from tandem.stack import Stack


def empty_operation_seconds(client: httpx.Client, *, run_id: str, seq_id: int) -> float:
    started = time.perf_counter()
    accepted = client.post(
        "optim_step",
        json={
            "model_id": run_id,
            "seq_id": seq_id,
            "adam_params": {"learning_rate": 1e-4},
            "type": "optim_step",
        },
    ).raise_for_status()
    client.post(
        "retrieve_future", json={"request_id": accepted.json()["request_id"]}, timeout=60
    ).raise_for_status()
    return time.perf_counter() - started


def empty_operation(stack: Stack, *, run_id: str, rounds: int) -> dict[str, float]:
    """Return p50 and p95 in milliseconds of operations in turn, by a plain HTTP client.

    The run must be new: its seq_ids are used from 1 on."""
    headers = {"X-API-Key": stack.endpoint.api_key}
    samples = []
    with http_client(f"{stack.endpoint.url}/api/v1", headers=headers) as client:
        for seq_id in range(1, rounds + 21):
            samples.append(empty_operation_seconds(client, run_id=run_id, seq_id=seq_id))
    counted = sorted(samples[20:])
    return {
        "p50_ms": round(statistics.median(counted) * 1e3, 2),
        "p95_ms": round(counted[int(len(counted) * 0.95)] * 1e3, 2),
    }
