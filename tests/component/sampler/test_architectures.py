"""A real engine computes trained models of every architecture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from sampler_service.vllm.environment import sampler_environment
from tests.support.architectures import CONFIGURATIONS, lora_of, write_model
from tests.support.local_trainer import forward_backward, logprobs, make, publish, step
from tests.support.tiny_model import VOCABULARY
from tests.support.trainer_worker import datum

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

NOT_ON_A_CPU = frozenset(["deepseek_v3", "gpt_oss"])
"""vLLM's CPU build lacks attention sinks. It computes latent attention differently, with matrices
that a load in place does not renew."""
FEW = frozenset(["cohere", "gemma2", "glm4", "gpt2", "phi", "qwen2", "qwen3_moe", "stablelm"])
"""vLLM's own classes of these serve no adapters of the head. The head is missing, biased or tied,
layers are stacked differently, adapters are missing, or there are experts."""
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, 30).tolist()


def train_and_publish(
    base: Path, architecture: str, version: Path, *, adapted: bool
) -> list[float]:
    trainer = make(base, lora_of(architecture) if adapted else None)
    scored = [datum(TOKENS[:-1], targets=TOKENS[1:])]
    for _ in range(2):
        forward_backward(trainer, scored)
        step(trainer)
    publish(trainer, version)
    return logprobs(trainer, scored).tolist()


def differences(folder: Path, architectures: Iterable[str], kinds: Iterable[str]) -> list[object]:
    """Train and publish each. Return those with other logprobs in an engine."""
    jobs = []
    for name in sorted(architectures):
        base = write_model(folder / name, name)
        job = {"name": name, "base": str(base), "tokens": TOKENS, "expected": {}}
        for kind in kinds:
            job[kind] = str(folder / f"{name}-{kind}")
            job["expected"][kind] = train_and_publish(
                base, name, Path(job[kind]), adapted=kind == "adapter"
            )
        jobs.append(job)
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs))
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    environment = sampler_environment(
        os.environ, cpu=True, library=library if library.is_file() else None
    )
    command = [sys.executable, "-m", "tests.support.engine_scores", str(file)]
    subprocess.run(command, env=environment, check=True, timeout=1500)
    wrong: list[object] = []
    for job in json.loads(file.read_text()):
        for kind, expected in job["expected"].items():
            found = job["found"][kind]
            if isinstance(found, str) or np.abs(np.subtract(found, expected)).max() > 1e-4:
                wrong.append((job["name"], kind, found))
    return wrong


def test_an_engine_serves_adapters_of_the_head_whatever_vllms_class_of_the_model_lists(tmp_path):
    assert not differences(tmp_path, FEW, ["adapter"])


def test_an_engine_computes_what_trainers_of_all_architectures_compute(tmp_path):
    assert not differences(tmp_path, CONFIGURATIONS.keys() - NOT_ON_A_CPU, ["full", "adapter"])
