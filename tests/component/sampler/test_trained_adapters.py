"""A real engine serves a trainer's LoRA adapters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tandem.protocol.worker import LoraSpec
from tests.support.local_trainer import logprobs, make, publish, train
from tests.support.sampler_worker import PROMPT, SamplerClient, assert_computed_by, plain_logprobs
from tests.support.trainer_worker import datum
from trainer_service.lora.merge import merge


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_an_adapter_and_its_successor_are_served_with_the_logprobs_of_trainer_and_merged_model(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
):
    """The adapters also change the output head, which is the tied model's embedding."""
    client: SamplerClient = request.getfixturevalue(
        {"tied": "tied_adapters", "untied": "untied"}[kind]
    )
    model: Path = request.getfixturevalue({"tied": "model", "untied": "untied_model"}[kind])
    trainer = make(model, LoraSpec(rank=4, seed=5))
    reference, served = model, []
    for number in (1, 2):
        train(trainer, 4, seed=number)
        reply = publish(trainer, tmp_path / f"v00000{number}-0000000a")
        assert reply.version.adapter
        loaded = client.load(reply.version)
        assert not loaded.HasField("failure"), loaded.failure
        assert loaded.canary_difference < 1e-4
        answer = client.sample(
            PROMPT, version=reply.version, n=2, seed=1, max_tokens=20, stop=[], prompt_logprobs=True
        )
        sequences = [PROMPT + sample.tokens for sample in answer.samples]
        found = [
            np.concatenate([answer.prompt_logprobs[1:], sample.logprobs])
            for sample in answer.samples
        ]
        data = [datum(tokens[:-1], targets=tokens[1:]) for tokens in sequences]
        assert np.abs(np.concatenate(found) - logprobs(trainer, data)).max() < 1e-4
        before = np.concatenate([plain_logprobs(reference, tokens) for tokens in sequences])
        assert np.abs(np.concatenate(found) - before).max() > 0.01, "nothing was learned"
        # The merged model is a separate model with an untied head.
        reference = tmp_path / f"merged-{number}"
        merge(Path(reply.version.path), model, reference)
        assert_computed_by(reference, PROMPT, answer)
        served.append((reply.version, reference))
    for version, merged in served:
        client.assert_serves(version, merged)
