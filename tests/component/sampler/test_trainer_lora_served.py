"""What a trainer publishes, served by a real engine: the trainer's own numbers come back."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tandem.v1 import common_pb2
from tests.support.local_trainer import make, publish, train
from tests.support.sampler_worker import SamplerClient, plain_logprobs
from tests.support.worker_process import RUN

PROMPT = [5, 9, 30, 41, 7, 7, 60]


def test_an_engine_serves_a_trained_adapter_with_its_unembedding_as_the_merged_model(
    tied_adapters: SamplerClient, model: Path, tmp_path: Path
) -> None:
    """The head is tied to the embedding. The engine compares the canary within 1e-4, too."""
    trainer = make(model)
    versions = []
    for number in (1, 2):
        train(trainer, 2, seed=number)
        publish(trainer, tmp_path / f"v{number}")
        publish(trainer, tmp_path / f"merged{number}", merged=True)
        versions.append(
            common_pb2.WeightVersion(
                name=f"{RUN}/v{number}",
                path=str(tmp_path / f"v{number}"),
                run_id=RUN,
                adapter=True,
            )
        )
    plain = [plain_logprobs(tmp_path / f"merged{number}", PROMPT) for number in (1, 2)]
    assert np.abs(plain[0] - plain[1]).max() > 0.01
    for version, expected in zip(versions, plain, strict=True):
        answer = tied_adapters.sample(
            PROMPT, version=version, max_tokens=1, stop=[], prompt_logprobs=True
        )
        np.testing.assert_allclose(answer.prompt_logprobs[1:], expected, atol=1e-4)
