"""What a trainer publishes of a LoRA run, served by a sampler: adapter, merged, and the trainer
itself say the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tandem.worker import LoraSpec
from tests.support.local_trainer import logprobs, make, publish, train
from tests.support.sampler_worker import SamplerClient, plain_logprobs
from tests.support.trainer_worker import datum

PROMPT = [5, 9, 30, 41]


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_sampled_logprobs_are_the_trainers_served_as_adapter_and_merged(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
):
    client: SamplerClient = request.getfixturevalue(
        {"tied": "tied_adapters", "untied": "untied"}[kind]
    )
    model: Path = request.getfixturevalue({"tied": "model", "untied": "untied_model"}[kind])
    trainer = make(model, LoraSpec(rank=4, seed=5))
    train(trainer, 8)
    reply = publish(trainer, tmp_path / "v000001-0000000a")
    assert reply.version.adapter
    loaded = client.load(reply.version)
    assert not loaded.HasField("failure"), loaded.failure
    assert loaded.canary_difference < 1e-4
    answer = client.sample(
        PROMPT, version=reply.version, n=2, seed=1, max_tokens=20, stop=[], prompt_logprobs=True
    )
    sequences = [PROMPT + sample.tokens for sample in answer.samples]
    found = [
        np.concatenate([answer.prompt_logprobs[1:], sample.logprobs]) for sample in answer.samples
    ]
    data = [datum(tokens[:-1], targets=tokens[1:]) for tokens in sequences]
    assert np.abs(np.concatenate(found) - logprobs(trainer, data)).max() < 1e-4
    base = np.concatenate([plain_logprobs(model, tokens) for tokens in sequences])
    assert np.abs(np.concatenate(found) - base).max() > 0.01, "nothing was learned"
    # The merged export is a model by itself, whose head is no longer tied.
    publish(trainer, tmp_path / "v000002-0000000b", merged=True)
    merged = [plain_logprobs(tmp_path / "v000002-0000000b", tokens) for tokens in sequences]
    assert np.abs(np.concatenate(found) - np.concatenate(merged)).max() < 1e-4
