"""Metrics and logs of all three services."""

from __future__ import annotations

import json

import httpx
from tinker import TrainingClient

from tests.support.sdk import SOON, adam, refusal, sample, train
from tests.support.stacks import VOCABULARY, TestStack


def names(text: str) -> set[str]:
    return {
        line.split("{")[0].split()[0]
        for line in text.splitlines()
        if line and not line.startswith("#")
    }


def test_metrics_of_gateway_trainer_and_sampler_answer(
    stack: TestStack, run: TrainingClient
) -> None:
    train(run, seed=211, steps=1)
    sample(run.save_weights_and_get_sampling_client().result(timeout=240), [7, 8, 9])
    gateway = httpx.get(f"{stack.stack.endpoint.url}/metrics", timeout=SOON)
    assert any(name.startswith("tandem_") for name in names(gateway.text))
    ready = [worker for worker in stack.status()["workers"] if worker["state"] == "ready"]
    for worker in ready:
        url = f"http://127.0.0.1:{worker['metrics_port']}/metrics"
        answer = httpx.get(url, timeout=SOON)
        assert any(name.startswith(f"tandem_{worker['kind']}_") for name in names(answer.text))
    assert {worker["kind"] for worker in ready} == {"trainer", "sampler"}


def test_log_lines_are_json_with_the_ids_of_session_run_and_request(
    stack: TestStack, run: TrainingClient
) -> None:
    sampler = run.save_weights_and_get_sampling_client().result(timeout=240)
    refusal(lambda: sample(sampler, [VOCABULARY]))  # each service logs something
    refusal(lambda: run.optim_step(adam()).result(timeout=SOON))
    train(run, seed=212, steps=1)
    keys: dict[str, set[str]] = {}
    for path in (stack.data_dir / "logs").glob("*.log"):
        service = path.name.split("-")[0].removesuffix(".log")
        for line in path.read_text().split("\n")[:-1]:  # the last may be half written
            if not line.startswith("{"):
                continue  # from a C library
            entry = json.loads(line)
            assert {"event", "level", "timestamp", "service"} <= entry.keys(), (path.name, line)
            assert entry["service"] == service
            keys.setdefault(service, set()).update(entry)
    assert {"session_id", "run_id", "request_id"} <= keys["gateway"]
    assert {"session_id", "run_id", "request_id", "tokens", "tokens_per_second"} <= keys["trainer"]
    assert {"session_id", "version"} <= keys["sampler"]
