"""Every architecture of the table, trained and then computed by a real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sampler_service.vllm.environment import sampler_environment
from tests.support.architectures import CONFIGURATIONS, EXPERTS, lora_of, write_model
from tests.support.local_trainer import forward_backward, logprobs, make, publish, step
from tests.support.tiny_model import VOCABULARY
from tests.support.trainer_worker import datum

NOT_ON_A_CPU = frozenset(["deepseek_v3", "gpt_oss"])
"""vLLM's build for CPUs does not compute attention sinks. Of latent attention it computes something
else, and keeps matrices that a load in place does not make again, so that such a load fails."""
WITHOUT_ADAPTERS = EXPERTS | {"gpt2"}
"""For which vLLM has no arithmetic of adapters, on a CPU or at all."""
WITH_HEADS = frozenset(["granite", "llama", "phi3", "qwen3"])
"""Of which vLLM takes adapters of the head, too."""
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, 30).tolist()


def train_and_publish(
    base: Path, architecture: str, version: Path, *, adapted: bool
) -> list[float]:
    lora = lora_of(architecture)
    if architecture not in WITH_HEADS:
        lora = lora.model_copy(update={"unembedding": False})
    trainer = make(base, lora if adapted else None)
    scored = [datum(TOKENS[:-1], targets=TOKENS[1:])]
    for _ in range(2):
        forward_backward(trainer, scored)
        step(trainer)
    publish(trainer, version)
    return logprobs(trainer, scored).tolist()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_an_engine_computes_what_trainers_of_all_architectures_compute(tmp_path):
    jobs = []
    for name in sorted(CONFIGURATIONS.keys() - NOT_ON_A_CPU):
        base = write_model(tmp_path / name, name)
        job = {"name": name, "base": str(base), "tokens": TOKENS, "expected": {}}
        for kind in ("full", "adapter"):
            if kind == "adapter" and name in WITHOUT_ADAPTERS:
                continue
            job[kind] = str(tmp_path / f"{name}-{kind}")
            job["expected"][kind] = train_and_publish(
                base, name, Path(job[kind]), adapted=kind == "adapter"
            )
        jobs.append(job)
    file = tmp_path / "jobs.json"
    file.write_text(json.dumps(jobs))
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    environment = sampler_environment(
        os.environ, cpu=True, library=library if library.is_file() else None
    )

    command = [sys.executable, "-m", "tests.support.engine_scores", str(file)]
    subprocess.run(command, env=environment, check=True, timeout=1500)

    wrong = []
    for job in json.loads(file.read_text()):
        for kind, expected in job["expected"].items():
            found = job["found"][kind]
            if isinstance(found, str) or np.abs(np.subtract(found, expected)).max() > 1e-4:
                wrong.append((job["name"], kind, found))
    assert not wrong
