"""When trainers keep weights in memory for an engine, and free them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tinker

from tandem.errors import LoadFailed
from tests.support.gateway.running import running_gateway
from tests.support.waiting import PATIENCE, wait_until


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


def test_an_engine_that_refuses_the_memory_loads_the_files_once_they_are_written(tmp_path: Path):
    with running_gateway(tmp_path, weights_handoff="on") as gate, gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        save(training)
        (_, trainer), (_, sampler) = (gate.worker(kind) for kind in ("trainer", "sampler"))
        sampler.handoff_error = LoadFailed("it is gone, and there are no files")
        trainer.disk_gate.clear()
        saving = training.save_weights_and_get_sampling_client()
        wait_until(lambda: sampler.handoffs[-1] == trainer.published, what="the engine refused")
        assert sampler.loaded[-1] != trainer.published
        gate.run(trainer.disk_gate.set)
        saving.result(timeout=PATIENCE)
        assert (sampler.handoffs[-1], sampler.loaded[-1]) == ("", trainer.published)


def test_a_gateway_that_ends_during_a_load_leaves_the_weights_to_the_engine(tmp_path: Path):
    """The engine may still read them. The trainer frees them later."""
    with running_gateway(tmp_path, weights_handoff="on") as gate:
        run_id = gate.run_id(gate.session_id())
        with gate.http() as client:
            body = {"model_id": run_id, "seq_id": 1, "sampling_session_seq_id": 0}
            saved = client.post("/api/v1/save_weights_for_sampler", json=body).json()
            gate.retrieve(saved["request_id"])
            _, trainer = gate.worker("trainer")
            _, sampler = gate.worker("sampler")
            trainer.released.clear()
            sampler.slow_loads[len(sampler.loaded) + 1] = asyncio.Event()
            body |= {"seq_id": 2, "sampling_session_seq_id": 1}
            client.post("/api/v1/save_weights_for_sampler", json=body)
            wait_until(lambda: sampler.handoffs[-1] == trainer.published, what="it is loading")
    assert trainer.requests[-1].handoff and not trainer.released


def test_without_a_gpu_and_of_adapters_nothing_is_kept(gate, service):
    for model in ("tiny:full", "tiny"):
        training = service.create_lora_training_client(model).result()
        save(training)
        _, trainer = gate.worker("trainer")
        _, sampler = gate.worker("sampler")
        save(training)
        assert not trainer.requests[-1].handoff and not trainer.released
        assert sampler.handoffs[-1] == ""
