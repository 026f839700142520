"""`vllm serve`, as `tandem checkpoints serve` renders it, answers as the gateway does."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tinker import TrainingClient, types

from tests.support.ports import known_port
from tests.support.sdk import TIMEOUT, sequences, train
from tests.support.stacks import TIED, TestStack
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

PROMPTS = sequences(4, seed=91)
TOKENS = 12
ON_A_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
QUICKLY = ["--enforce-eager"]
"""Without the compiler, which ON_A_CPU disables."""


@pytest.mark.parametrize("unembed", [True, False])
def test_an_adapter_answers_in_vllm_as_in_the_gateway(
    stack: TestStack, tmp_path: Path, unembed: bool
) -> None:
    with stack.service() as service:
        asked = service.create_lora_training_client(TIED, rank=4, seed=3, train_unembed=unembed)
        served_as_trained(stack, asked.result(timeout=TIMEOUT), tmp_path)


def test_a_merged_adapter_answers_in_vllm_as_in_the_gateway(
    stack: TestStack, tmp_path: Path
) -> None:
    with stack.service() as service:
        training = service.create_lora_training_client(TIED, rank=4, seed=3).result(TIMEOUT)
        served_as_trained(stack, training, tmp_path, "--merged")


def test_a_whole_model_answers_in_vllm_as_in_the_gateway(stack: TestStack, tmp_path: Path) -> None:
    with stack.service() as service:
        training = service.create_lora_training_client(f"{TIED}:full").result(TIMEOUT)
        served_as_trained(stack, training, tmp_path)


def served_as_trained(
    stack: TestStack, training: TrainingClient, folder: Path, *options: str
) -> None:
    before, _ = answers(training, "before")
    train(training, seed=92)
    expected, path = answers(training, "tuned")
    assert expected != before
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TINKER_BASE_URL": stack.stack.endpoint.url,
        "TINKER_API_KEY": stack.stack.endpoint.api_key,
    }

    def run(command: list[str]) -> str:
        return subprocess.run(
            command,
            env=environment,
            cwd=folder,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT,
        ).stdout

    asked = ["tandem", "checkpoints", "serve", path, "--dtype", "float32", "--json", *options]
    download, serve = json.loads(run(asked))["commands"]
    run(download)
    with server(serve, environment, folder) as client:
        assert [completion(client, tokens) for tokens in PROMPTS] == expected


def answers(training: TrainingClient, name: str) -> tuple[list[list[int]], str]:
    """Save the weights, and return the gateway's greedy answers and the path."""
    path = training.save_weights_for_sampler(name).result(timeout=TIMEOUT).path
    sampler = training.create_sampling_client(path).result(timeout=TIMEOUT)
    greedy = types.SamplingParams(max_tokens=TOKENS, temperature=0.0)
    futures = [sampler.sample(types.ModelInput.from_ints(each), 1, greedy) for each in PROMPTS]
    return [list(each.result(timeout=TIMEOUT).sequences[0].tokens) for each in futures], path


@contextmanager
def server(
    command: list[str], environment: Mapping[str, str], folder: Path
) -> Iterator[httpx.Client]:
    port, log = known_port(), folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *QUICKLY, "--host=127.0.0.1", f"--port={port}"],
            env={**environment, **ON_A_CPU, "PYTHONPATH": str(named_vllm(folder))},
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT) as client:

            def ready() -> bool:
                assert process.poll() is None, log.read_text()[-3000:]
                try:
                    return client.get("/health").is_success
                except httpx.TransportError:
                    return False

            wait_until(ready, what="vllm serve is ready", timeout=400)
            yield client
    finally:
        process.terminate()
        process.wait(timeout=60)


def named_vllm(folder: Path) -> Path:
    """Return a folder for Python's path. The command of the package vllm-cpu 0.32 ends at once, as
    it asks for the release of a package `vllm`."""
    release = importlib.metadata.version("vllm-cpu") + "+cpu"
    about = folder / "packages" / f"vllm-{release}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n")
    return about.parent


def completion(client: httpx.Client, prompt: list[int]) -> list[int]:
    asked = {
        "model": "tuned",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
    answer = client.post("/v1/completions", json=asked)
    assert answer.is_success, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens
