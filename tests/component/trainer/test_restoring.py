"""Trainers continue from snapshots of two ranks."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.losses.batches import mixed_data
from tests.support.trainer_worker import TrainerClient, request, trainer_process


def train(client: TrainerClient, *numbers: int) -> None:
    for number in numbers:
        client.output(request(mixed_data(seed=number)))
        assert not client.optim_step().HasField("failure")


def weights(client: TrainerClient, folder) -> dict[str, np.ndarray]:
    reply, path = client.publish(folder)
    assert not reply.HasField("failure"), reply.failure
    found: dict[str, np.ndarray] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.fixture(scope="module")
def undisturbed(models, tmp_path_factory):
    """Snapshots at step 2 and, with gradients, before step 4, and the weights after step 4."""
    folder = tmp_path_factory.mktemp("data")
    path, later = (str(folder / "snapshots" / name) for name in ("s2", "s3"))
    with trainer_process(models["qwen3"], folder, ranks=2) as client:
        train(client, 1)
        client.output(request(mixed_data(seed=2)))
        client.optim_step(snapshot=path)
        train(client, 3)
        reply = client.await_snapshot(path)
        assert (reply.step, reply.seq_id) == (2, 4), reply.failure
        client.output(request(mixed_data(seed=4)))
        reply = client.take_snapshot(later)
        assert (reply.step, reply.seq_id) == (3, 6), reply.failure
        client.optim_step()
        yield {2: path, 3: later}, weights(client, folder)


@pytest.mark.parametrize(("ranks", "steps"), [(1, 2), (2, 2), (2, 3)])
def test_a_trainer_goes_on_from_a_snapshot_with_any_number_of_ranks(
    models, tmp_path, undisturbed, ranks, steps
):
    paths, expected = undisturbed
    with trainer_process(models["qwen3"], tmp_path, ranks=ranks) as client:
        assert client.restore(paths[steps], seq_id=2 * steps).step == steps
        assert client.describe().last_seq_id == 2 * steps
        train(client, *range(steps + 1, 5))
        found = weights(client, tmp_path)
        client.seq_id = 2
        with pytest.raises(grpc.RpcError, match="operation 3 was applied already"):
            client.optim_step()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if ranks == 2:
            np.testing.assert_array_equal(found[name], tensor, err_msg=name)
        else:
            np.testing.assert_allclose(found[name], tensor, atol=1e-5, err_msg=name)
