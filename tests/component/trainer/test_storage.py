"""Versions and checkpoints of real trainer processes."""

from __future__ import annotations

import json
import os

import pytest

from tandem.protocol.worker import TrainingSpec
from tandem.weights import open_version
from tests.support import failing_ranks
from tests.support.local_trainer import forward_backward, load, make, save, step
from tests.support.losses.batches import mixed_data
from tests.support.trainer_worker import datum, request, trainer_process


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_published_type_is_the_compute_type(models, tmp_path, ranks):
    with trainer_process(models["llama"], tmp_path, dtype="bfloat16", ranks=ranks) as client:
        client.output(request([datum([5, 6, 7])]))
        assert not client.optim_step().HasField("failure")
        reply, path = client.publish(tmp_path)
    assert not reply.HasField("failure"), reply.failure
    assert open_version(path).dtype == "bfloat16"
    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_early_version_of_two_ranks_is_durable_or_gone(models, tmp_path, monkeypatch):
    failing_ranks.install(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with trainer_process(
        models["qwen3"], tmp_path, ranks=2, backend="fails_in_sync", shard_group_parameters=1
    ) as client:
        client.output(request([datum([5, 6, 7])]))
        client.optim_step()
        early, path = client.publish(tmp_path, early=True)
        assert not early.durable
        reply = client.await_published(early.version)
        assert (reply.durable, reply.failure.type) == (False, "storage_full")
        assert not path.exists()
        for number in (2, 3):
            early, path = client.publish(tmp_path, number, early=True)
            open_version(path)
            assert len([*path.glob("model-*.safetensors")]) == 2
            reply = client.await_published(early.version)
            assert reply.durable and not reply.HasField("failure"), reply.failure
            open_version(path)


def test_a_checkpoint_of_two_ranks_loads_into_one_and_back(models, tmp_path):
    one = make(models["qwen3"], None)
    with trainer_process(models["qwen3"], tmp_path, ranks=2, shard_group_parameters=1) as two:
        for seed in range(2):
            two.output(request(mixed_data(seed=seed)))
            two.optim_step()
        assert two.save(tmp_path / "a").step == 2
        load(one, tmp_path / "a")
        for seed in range(2):
            forward_backward(one, mixed_data(seed=seed))
            step(one, lr=1e-3, decay=0.0)
        save(one, tmp_path / "b")
        for seed in range(2):
            two.output(request(mixed_data(seed=seed)))
            two.optim_step()
        score = request(mixed_data(seed=9), forward_only=True)
        went_on = two.output(score).metrics["loss:sum"]
        assert two.load(tmp_path / "b", optimizer=True).step == 4
        loaded = two.output(score).metrics["loss:sum"]
    assert went_on == pytest.approx(loaded, rel=1e-3)


def test_a_file_that_another_rank_finds_damaged_is_refused_and_training_goes_on(models, tmp_path):
    with trainer_process(models["qwen3"], tmp_path, ranks=2) as two:
        two.output(request(mixed_data(seed=0)))
        two.optim_step()
        assert not two.save(tmp_path / "a").HasField("failure")
        for number in range(2):  # the ranks share the checks of files
            file = tmp_path / "a" / f"rank-{number}-0.safetensors"
            whole = file.read_bytes()
            file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            reply = two.load(tmp_path / "a", optimizer=True)
            assert reply.failure.type == "checkpoint_damaged"
            assert f"{file.name} is damaged" in reply.failure.message
            file.write_bytes(whole)
        two.output(request(mixed_data(seed=1)))
        assert two.optim_step().step == 2
        assert two.load(tmp_path / "a", optimizer=True).step == 1


def test_two_ranks_with_states_in_bfloat16_go_on_from_a_checkpoint_bit_by_bit(models, tmp_path):
    training = TrainingSpec(states="bfloat16")
    score = request(mixed_data(seed=9), forward_only=True)
    with trainer_process(models["qwen3"], tmp_path, ranks=2, training=training) as two:
        for step_number in range(2):
            two.output(request(mixed_data(seed=step_number)))
            two.optim_step()
        assert not two.save(tmp_path / "a").HasField("failure")
        results = []
        for _ in range(2):
            two.output(request(mixed_data(seed=2)))
            assert two.optim_step().step == 3
            results.append(two.output(score).metrics["loss:sum"])
            assert two.load(tmp_path / "a", optimizer=True).step == 2
    assert results[0] == results[1]
