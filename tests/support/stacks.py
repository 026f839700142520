"""Real stacks with base models small enough for a test. Nothing is faked."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tinker
from safetensors.numpy import load_file, save_file
from tinker import TrainingClient

from tandem.demo.tiny_model import TinyShape, write_tiny_model
from tandem.stack import Stack
from tandem.weights import version_path
from tests.support.processes import Process, group_of, marked
from tests.support.waiting import wait_until

TIED, LLAMA = "test/tied", "test/llama"
VOCABULARY = 128
MAX_LENGTH = 256
SMALL = {
    "port": "0",
    "session_ttl": "600",  # not every client of these tests sends heartbeats
    # These tests compare float32 to 1e-4. On a GPU, several engines share it.
    "trainer_dtype": "float32",
    "sampler_dtype": "float32",
    "sampler_gpu_memory_utilization": "0.08",
    "sampler_kv_cache_bytes": str(32 * 2**20),
    "sampler_max_num_seqs": "64",
    "trainer_threads": "1",
}

_FIRST, _LAST = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
GROUPS = {
    "none": "[]",
    # One core trains, another samples.
    "two": json.dumps(
        [
            {"name": "train", "devices": [f"cpu:{_FIRST}"], "roles": ["trainer"]},
            {"name": "sample", "devices": [f"cpu:{_LAST}"], "roles": ["sampler"]},
        ]
    ),
    # One core does both in turns.
    "one": json.dumps(
        [{"name": "both", "devices": [f"cpu:{_FIRST}"], "roles": ["trainer", "sampler"]}]
    ),
}
""""two" needs two cores."""


@dataclass(frozen=True)
class TestStack:
    """A running stack. All its processes carry `mark`."""

    __test__ = False

    stack: Stack
    mark: str

    @property
    def data_dir(self) -> Path:
        return self.stack.data_dir

    def service(self, **arguments) -> tinker.ServiceClient:
        """Return the unmodified SDK for this gateway."""
        endpoint = self.stack.endpoint
        return tinker.ServiceClient(
            **{"base_url": endpoint.url, "api_key": endpoint.api_key, **arguments}
        )

    def status(self) -> dict[str, list[dict]]:
        with self.stack.client() as client:
            answer = client.get("status")
            answer.raise_for_status()
            return answer.json()

    def worker(self, kind: str, *, session_id: str) -> dict:
        """Wait until there is exactly one."""

        def one() -> dict | None:
            ready = [
                worker
                for worker in self.status()["workers"]
                if worker["kind"] == kind
                and session_id in worker["id"]
                and worker["state"] == "ready"
            ]
            return ready[0] if len(ready) == 1 else None

        return wait_until(one, what=f"session {session_id} has one ready {kind}")

    def reasons_of_ends(self) -> set[str]:
        """Return the reasons for which the gateway has ended workers."""
        lines = self.stack.log_path.read_text().splitlines()
        entries = [json.loads(line) for line in lines if '"worker_stopping"' in line]
        return {entry["reason"] for entry in entries}

    def processes(self) -> list[Process]:
        return marked(self.mark)

    def processes_of(self, worker: dict) -> list[Process]:
        return group_of(worker["pid"], mark=self.mark)

    def run(self, training: TrainingClient) -> dict:
        run_id = training.model_id
        return next(run for run in self.status()["runs"] if run["id"] == run_id)

    def newest_version(self, training: TrainingClient) -> Path:
        return version_path(self.data_dir, self.run(training)["weight_version"])

    def published(self, training: TrainingClient) -> dict[str, np.ndarray]:
        tensors: dict[str, np.ndarray] = {}
        for file in sorted(self.newest_version(training).glob("*.safetensors")):
            tensors |= load_file(file)
        return tensors


@contextmanager
def running(
    data_dir: Path,
    *,
    models: dict[str, Path],
    settings: dict[str, str] | None = None,
    say: Callable[[str], None] = lambda sentence: None,
    gateway: str = "gateway",
    agent: str = "tandem.agent",
) -> Iterator[TestStack]:
    """`gateway` and `agent` are the modules that run as these."""
    mark = f"test-{uuid.uuid4().hex}"
    settings = {**SMALL, **(settings or {}), "test_mark": mark}
    stack = Stack(data_dir=data_dir, settings=settings, say=say, start_timeout=240)
    stack._gateway._command = [sys.executable, "-m", gateway]
    stack._agent._command = [sys.executable, "-m", agent, "--data-dir", str(data_dir)]
    with stack:
        for name, path in models.items():
            stack.add_model(name=name, path=path)
        yield TestStack(stack=stack, mark=mark)
    wait_until(lambda: not marked(mark), what="the stack's processes have ended")


def session_of(training: TrainingClient) -> str:
    return training.model_id.partition(":")[0]


def _shape(*, tied: bool) -> TinyShape:
    return TinyShape(hidden=64, layers=2, ffn=128, heads=2, max_length=MAX_LENGTH, tied=tied)


def write_qwen(path: Path, *, seed: int) -> Path:
    write_tiny_model(path, seed=seed, shape=_shape(tied=True))
    return path


def write_llama(path: Path, *, seed: int) -> Path:
    """Another architecture: no norms on queries and keys, grouped key heads, an untied head."""
    shape = _shape(tied=False)
    write_tiny_model(path, seed=seed, shape=shape)
    config = json.loads((path / "config.json").read_text())
    for key in ("use_sliding_window", "sliding_window"):
        del config[key]
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": 1,
        "mlp_bias": False,
        "bos_token_id": 0,
    }
    (path / "config.json").write_text(json.dumps(config))
    weights = path / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(weights).items():
        if "q_norm" in name or "k_norm" in name:
            continue
        one_head = "k_proj" in name or "v_proj" in name
        tensors[name] = tensor[: shape.head_dim].copy() if one_head else tensor
    save_file(tensors, weights, metadata={"format": "pt"})
    return path
