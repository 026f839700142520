"""Weight versions and checkpoints of real trainer processes."""

from __future__ import annotations

import json

import pytest

from tandem.weights import open_version
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
