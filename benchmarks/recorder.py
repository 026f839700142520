"""`make bench-recorder`: the cost of recording a turn of a chat.

The same chats go to a gateway with a real engine, once plain and once through a trace, in turn.
Each chat grows turn by turn, as an agent's does. A plain request tokenises the whole chat each
time, and a recorded one continues the tokens of the trace."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import psutil
from rich.console import Console

from benchmarks import record
from tandem.demo.tiny_model import write_tiny_model
from tandem.protocol.own_machine import http_client
from tandem.stack import Stack

MODEL = "bench/chat"
TOKENS = 8
QUESTION = "Which of the numbers in this list is the largest, and why? 17, 4, 23, 8. " * 4


def chat(client: httpx.Client, url: str, key: str, *, turns: int, seed: int) -> list[float]:
    """Hold a chat. Returns the milliseconds of each turn."""
    messages: list[dict[str, str]] = []
    found = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{QUESTION} ({seed}.{turn})"})
        body = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": TOKENS,
            "seed": seed * 1000 + turn,
        }
        began = time.perf_counter()
        answer = client.post(
            f"{url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
        )
        found.append(1000 * (time.perf_counter() - began))
        said = answer.raise_for_status().json()["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": said or ""})
    return found


def gateway_of(stack: Stack) -> psutil.Process:
    port = httpx.URL(stack.endpoint.url).port
    (pid,) = {
        each.pid
        for each in psutil.net_connections("tcp")
        if each.pid and each.status == psutil.CONN_LISTEN and each.laddr.port == port
    }
    return psutil.Process(pid)


def summary(values: list[float]) -> dict[str, float]:
    *_, p95 = quantiles(values, n=20)
    return {"median": round(median(values), 2), "p95": round(p95, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.recorder", description=__doc__)
    parser.add_argument("--chats", type=int, default=60, help="of each kind")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--no-save", action="store_true", help="only print")
    asked = parser.parse_args()
    console = Console()
    load = os.getloadavg()
    times: dict[str, list[list[float]]] = {"plain": [], "recorded": []}
    processor = {"plain": 0.0, "recorded": 0.0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "model", seed=0, tokenizer="qwen")
        with Stack(data_dir=folder / "data", settings={"port": "0"}) as stack:
            stack.add_model(name=MODEL, path=folder / "model")
            endpoint = stack.endpoint
            gateway = gateway_of(stack)
            with http_client(endpoint.url) as client, stack.client() as own:
                chat(client, endpoint.url, endpoint.api_key, turns=2, seed=0)  # starts the engine

                def recorded(seed: int) -> list[float]:
                    made: dict[str, Any] = own.post("traces", json={"model": MODEL}).json()
                    found = chat(
                        client, made["base_url"], made["key"], turns=asked.turns, seed=seed
                    )
                    return found

                def plain(seed: int) -> list[float]:
                    url, key = endpoint.url, endpoint.api_key
                    return chat(client, url, key, turns=asked.turns, seed=seed)

                kinds = {"plain": plain, "recorded": recorded}
                for number in range(asked.chats):
                    names = list(kinds) if number % 2 else list(kinds)[::-1]
                    for kind in names:
                        before = sum(gateway.cpu_times()[:2])
                        seed = 2 * number + (kind == "plain")  # no cached prefix is shared
                        times[kind].append(kinds[kind](seed))
                        processor[kind] += sum(gateway.cpu_times()[:2]) - before
    pairs = zip(times["plain"], times["recorded"], strict=True)
    more = [
        there - here for plain_, made in pairs for here, there in zip(plain_, made, strict=True)
    ]
    count = asked.chats * asked.turns
    result = {
        "turns": count,
        "load": [load[0], os.getloadavg()[0]],
        "milliseconds": {kind: summary([*chain(*found)]) for kind, found in times.items()},
        "more_milliseconds": summary(more),
        "last_turns_more_milliseconds": summary(more[asked.turns - 1 :: asked.turns]),
        "gateway_cpu_milliseconds": {
            kind: round(1000 * seconds / count, 2) for kind, seconds in processor.items()
        },
    }
    console.print_json(json.dumps(result))
    if not asked.no_save:
        console.print(
            f"written to {record.save({'machine': record.machine(), 'recorder': result})}"
        )


if __name__ == "__main__":
    main()
