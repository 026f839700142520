from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support.sampler_worker import PROMPT, Sampled, SamplerClient, same, sampler_process
from tests.support.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
]

BUDGET = 4 * 2**30


def sampled(client: SamplerClient) -> Sampled:
    return client.sample(PROMPT, seed=3, max_tokens=20, stop=[], prompt_logprobs=True)


def test_each_level_frees_the_gpu_and_samples_are_the_same_afterwards(tmp_path: Path):
    model = write_tiny_model(
        tmp_path / "model", head_dim=64, max_length=512, hidden=1024, intermediate=8192
    )
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) // 2  # in bfloat16
    with sampler_process(
        model, lease=1, devices=("cuda:0",), gpu_memory_bytes=BUDGET, max_num_seqs=16
    ) as client:
        expected = sampled(client)
        for level in (1, 2, 1):
            asleep = client.sleep(level)
            assert asleep.bytes_moved > BUDGET / 2, "most of it is the KV cache"
            assert (asleep.host_bytes >= weights) == (level == 1)
            awake = client.wake()
            assert awake.device_bytes - asleep.device_bytes > BUDGET / 2
            assert awake.host_bytes == 0
            assert same(sampled(client), expected)
