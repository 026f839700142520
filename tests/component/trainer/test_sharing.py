"""Several LoRA runs in one trainer."""

from __future__ import annotations

import os
import signal

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file

from tandem.agent.worker_process import group_members
from tandem.protocol.worker import Layout, LoraSpec, TrainingSpec
from tests.support.architectures import write_model
from tests.support.local_trainer import data_of
from tests.support.trainer_worker import TrainerClient, request, trainer_process
from tests.support.worker_process import CALL_SECONDS, RUN, SESSION

pytestmark = pytest.mark.slow

A = TrainingSpec(lora=LoraSpec(rank=4, seed=5))
B = TrainingSpec(lora=LoraSpec(rank=2, seed=6, alpha=8, mlp=False))
OTHER = f"{SESSION}:train:1"


def train(client: TrainerClient, *numbers: int) -> None:
    for number in numbers:
        client.output(request(data_of(number)))
        assert not client.optim_step(lr=1e-2).HasField("failure")


def tensors(client: TrainerClient, folder) -> dict[str, np.ndarray]:
    reply, path = client.publish(folder)
    assert not reply.HasField("failure"), reply.failure
    found: dict[str, np.ndarray] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, Layout()),
        (2, Layout()),
        pytest.param(2, Layout(tensor_parallel=2), marks=pytest.mark.nightly),
    ],
)
def test_two_runs_of_a_process_train_as_each_does_in_its_own(models, tmp_path, ranks, layout):
    model = models["qwen3"]
    if layout.tensor_parallel > 1:  # the small model has too few heads
        model = write_model(tmp_path / "model", "qwen3")
    training_a, training_b = (each.model_copy(update={"layout": layout}) for each in (A, B))
    with trainer_process(model, tmp_path, training=training_a, ranks=ranks) as a:
        train(a, 1)
        b = a.of_run(OTHER)
        with pytest.raises(grpc.RpcError, match="does not host") as caught:
            b.optim_step()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        b.seq_id = 0
        large = TrainingSpec(lora=LoraSpec(rank=400), layout=layout)
        assert b.add(large).failure.type == "unsuitable_lora"
        about = b.add(training_b).about
        assert list(about.run_ids) == [RUN, OTHER]
        assert about.trainable_parameters < a.describe().trainable_parameters
        b.output(request(data_of(5)))
        a.output(request(data_of(2)))
        snapshots = {client: str(tmp_path / client.run_id[-1]) for client in (a, b)}
        for client, path in snapshots.items():
            client.optim_step(lr=1e-2, snapshot=path)
        for client, path in snapshots.items():
            assert client.await_snapshot(path).seq_id == client.seq_id
        train(b, 6)
        found = tensors(a, tmp_path), tensors(b, tmp_path)
        a.remove()
        assert list(b.describe().run_ids) == [OTHER]
        with pytest.raises(grpc.RpcError, match="the last run"):
            b.remove()
        train(b, 7)
        last = tensors(b, tmp_path)
        again = a.of_run("again")  # after the first run was removed
        assert not again.add(training_a).HasField("failure")
        assert again.restore(snapshots[a], seq_id=4).step == 2
        assert_same(tensors(again, tmp_path), found[0])

    with trainer_process(model, tmp_path, training=training_a, ranks=ranks) as own:
        train(own, 1, 2)
        assert_same(tensors(own, tmp_path), found[0])
    with trainer_process(model, tmp_path, training=training_b, ranks=ranks) as own:
        train(own, 5, 6)
        assert_same(tensors(own, tmp_path), found[1])
        train(own, 7)
        assert_same(tensors(own, tmp_path), last)


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_runs_of_a_process_sleep_and_wake_at_once(models, tmp_path, ranks):
    sleeping = {"training": A, "ranks": ranks, "lease": 1}
    norms = {}
    for slept in (False, True):
        with trainer_process(models["qwen3"], tmp_path, **sleeping) as a:
            b, late = a.of_run(OTHER), a.of_run("late")
            b.add(B)
            train(b, 1)
            a.output(request(data_of(2)))
            if slept:
                a.hold(2)
                reply = a.sleep(spill_folder=str(tmp_path))
                assert reply.device_bytes == 0 and reply.disk_bytes > 0, reply
                assert a.describe().asleep and b.describe().asleep
                for client in (b, late):
                    client.hold(2)
                with pytest.raises(grpc.RpcError, match="it is asleep"):
                    late.add(A)
                a.hold(3)
                assert not a.wake().HasField("failure")
                for client in (b, late):
                    client.hold(3)
            b.output(request(data_of(3)))
            norms[slept] = [client.optim_step().metrics["grad_norm"] for client in (a, b)]
            assert not late.add(A).HasField("failure")
    assert norms[True] == norms[False]


def test_the_death_of_a_rank_is_that_of_every_run(models, tmp_path):
    with trainer_process(models["qwen3"], tmp_path, training=A, ranks=2) as a:
        b = a.of_run(OTHER)
        b.add(B)
        (rank_1,) = set(group_members(a.process.pid)) - {a.process.pid}
        os.kill(rank_1, signal.SIGKILL)
        for client in (a, b):
            with pytest.raises(grpc.RpcError) as caught:
                client.output(request(data_of(1)))
            assert caught.value.code() in (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE)
        assert a.next_report().error == "rank 1 was killed by SIGKILL"
        assert a.process.wait(timeout=CALL_SECONDS) == 1
