from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from tandem.protocol.worker import TrainingSpec
from tests.support.losses.batches import mixed_data
from tests.support.sampler_worker import PROMPT, Sampled, sampler_process
from tests.support.tiny_model import write_tiny_model
from tests.support.trainer_worker import request, trainer_process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.timeout(900),
]


def test_an_engine_on_two_gpus_serves_as_an_engine_on_one(tmp_path):
    """In float32: the base model, a published version, and that version after a sleep."""
    model = write_tiny_model(tmp_path / "model", head_dim=64, max_length=512)
    with trainer_process(
        model,
        tmp_path,
        training=TrainingSpec(),
        dtype="float32",
        device="cuda",
        devices=["cuda:0"],
        threads=0,
    ) as trainer:
        trainer.output(request(mixed_data()))
        assert not trainer.optim_step(lr=1e-2).HasField("failure")
        reply, _ = trainer.publish(tmp_path)
        assert not reply.HasField("failure"), reply

    def answers(ranks: int) -> list[Sampled]:
        with sampler_process(
            model,
            lease=1,
            devices=tuple(f"cuda:{rank}" for rank in range(ranks)),
            device="cuda",
            dtype="float32",
            ranks=ranks,
            gpu_memory_bytes=4 * 2**30,
            max_num_seqs=16,
        ) as engine:

            def sampled(version) -> Sampled:
                settings = {"seed": 3, "max_tokens": 20, "stop": [], "prompt_logprobs": True}
                return engine.sample(PROMPT, version=version, **settings)

            found = [sampled(engine.base), sampled(reply.version)]
            engine.sleep(2)
            engine.wake(reply.version)
            return [*found, sampled(reply.version)]

    for one, two in zip(answers(1), answers(2), strict=True):
        assert one.version == two.version
        for ours, theirs in zip(one.samples, two.samples, strict=True):
            assert ours.tokens == theirs.tokens
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-3)
