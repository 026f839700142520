"""When the gateway lets a trainer keep weights in memory for an engine, and when to free them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tinker

from tandem.errors import LoadFailed
from tests.support.gateway.running import running_gateway


def save(training: tinker.TrainingClient) -> None:
    training.save_weights_and_get_sampling_client().result()


def test_what_is_kept_is_named_to_the_engine_and_freed_after_the_load_well_or_not(tmp_path: Path):
    with running_gateway(tmp_path, weights_handoff="on") as gate, gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        save(training)
        (_, trainer), (_, sampler) = (gate.worker(kind) for kind in ("trainer", "sampler"))
        trainer.released.clear()
        save(training)
        assert trainer.requests[-1].handoff
        version = trainer.published
        assert sampler.handoffs[-1] == version and trainer.released == [version]

        sampler.load_error = LoadFailed("no")
        with pytest.raises(tinker.RequestFailedError, match="load_failed"):
            save(training)
        assert trainer.released == [version, trainer.published]

        training.save_weights_for_sampler("named").result()
        assert not trainer.requests[-1].handoff, "no engine is to load it"


def test_without_a_gpu_and_of_adapters_nothing_is_kept(gate, service):
    for model in ("tiny:full", "tiny"):
        training = service.create_lora_training_client(model).result()
        save(training)
        _, trainer = gate.worker("trainer")
        _, sampler = gate.worker("sampler")
        save(training)
        assert not trainer.requests[-1].handoff and not trainer.released
        assert sampler.handoffs[-1] == ""
