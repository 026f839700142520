"""Real trainers sleep, wake, and refuse calls without their lease."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import grpc
import psutil
import pytest
import torch
from safetensors.torch import load_file

from tandem.agent.worker_process import group_members
from tandem.demo.tiny_model import TinyShape, write_tiny_model
from tandem.protocol.fencing import FENCED_METADATA_KEY
from tandem.protocol.worker import LoraSpec, TrainingSpec
from tandem.v1 import common_pb2, trainer_pb2
from tests.support.losses.batches import mixed_data
from tests.support.trainer_worker import TrainerClient, request, trainer_process
from tests.support.waiting import wait_until
from tests.support.worker_process import CALL_SECONDS

pytestmark = pytest.mark.slow

LORA = TrainingSpec(lora=LoraSpec(rank=4, seed=3), optimizer="dimuon")


def switch(client: TrainerClient, lease: int, *, spill: Path | None = None) -> None:
    """Sleep with the token `lease`, and wake with the next one."""
    client.hold(lease)
    reply = client.sleep(spill_folder=str(spill or ""))
    assert not reply.HasField("failure"), reply.failure
    assert (reply.disk_bytes > 0) == (spill is not None)
    assert client.describe().asleep
    client.hold(lease + 1)
    assert not client.wake().HasField("failure")
    assert not client.describe().asleep


def weights(client: TrainerClient, folder: Path) -> dict[str, torch.Tensor]:
    reply, path = client.publish(folder)
    assert not reply.HasField("failure"), reply.failure
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


def trained(client: TrainerClient, folder: Path, *, sleeps: bool, dimuon: bool):
    """The weights after three steps of two batches each. If it sleeps, it does so at every chance,
    in turn on disk and in memory."""
    lease = 1
    for number in range(3):
        for batch in (number, number + 10):
            client.output(request(mixed_data(seed=batch)))
            if sleeps:
                switch(client, lease := lease + 2, spill=folder if batch % 2 else None)
        client.output(request(mixed_data(seed=5), forward_only=True))
        if sleeps:
            switch(client, lease := lease + 2, spill=folder)
        if dimuon:
            reply = client.stub.OptimStep(
                trainer_pb2.OptimStepRequest(
                    header=client.header(),
                    dimuon=trainer_pb2.DiMuonParams(learning_rate=1e-2, beta1=0.9),
                ),
                metadata=client.metadata,
                timeout=CALL_SECONDS,
            )
        else:
            reply = client.optim_step(lr=1e-2)
        assert not reply.HasField("failure"), reply.failure
    return weights(client, folder)


@pytest.mark.parametrize(
    ("ranks", "training", "more"),
    [
        (1, None, {}),
        (2, None, {"shard_group_parameters": 1}),
        pytest.param(2, LORA, {}, marks=pytest.mark.nightly),
        pytest.param(1, None, {"dtype": "bfloat16"}, marks=pytest.mark.nightly),
    ],
    ids=["one", "two", "two-lora", "one-bfloat16"],
)
def test_a_trainer_that_sleeps_ends_with_the_weights_of_one_that_does_not(
    models, tmp_path, ranks, training, more
):
    found = []
    for sleeps in (False, True):
        folder = tmp_path / str(sleeps)
        with trainer_process(
            models["qwen3"], folder, ranks=ranks, training=training, lease=1, **more
        ) as client:
            found.append(trained(client, folder, sleeps=sleeps, dimuon=training is not None))
    alone, slept = found
    assert alone.keys() == slept.keys()
    assert all(torch.equal(alone[name], slept[name]) for name in alone)


@pytest.fixture(scope="module")
def two(models, tmp_path_factory):
    with trainer_process(
        models["qwen3"], tmp_path_factory.mktemp("data"), ranks=2, lease=1, collective_timeout=8
    ) as client:
        yield client


def newest(client: TrainerClient) -> int:
    """The trainer's newest lease, from its refusal of the token 0."""
    client.hold(0)
    with pytest.raises(grpc.RpcError) as refused:
        client.sleep()
    return int(dict(refused.value.trailing_metadata())[FENCED_METADATA_KEY])


def refused(call, *, newest: int) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert dict(caught.value.trailing_metadata())[FENCED_METADATA_KEY] == str(newest)
    return caught.value.details()


def test_ranks_that_sleep_for_long_do_not_time_out(two):
    two.hold(lease := newest(two) + 1)
    two.sleep()
    with pytest.raises(subprocess.TimeoutExpired):
        two.process.wait(timeout=10)
    two.hold(lease + 1)
    assert not two.wake().HasField("failure")
    two.output(request(mixed_data()))
    assert not two.optim_step().HasField("failure")


def test_nothing_that_needs_the_devices_runs_without_the_lease(two, tmp_path):
    lease = newest(two) + 1
    calls = [
        lambda: two.output(request(mixed_data())),
        two.optim_step,
        lambda: two.publish(tmp_path),
        lambda: two.save(tmp_path / "checkpoint"),
        lambda: two.load(tmp_path / "checkpoint", optimizer=True),
        lambda: two.take_snapshot(str(tmp_path / "snapshot")),
        lambda: two.restore("", seq_id=two.seq_id),
    ]
    two.hold(lease)
    two.sleep()
    for call in calls:
        before = two.seq_id
        assert "it is asleep" in refused(call, newest=lease)
        two.seq_id = before
    two.hold(lease + 1)
    two.wake()
    for token in (0, lease, lease + 2):
        two.hold(token)
        for call in calls:
            before = two.seq_id
            assert "it is awake" in refused(call, newest=lease + 1)
            two.seq_id = before
    # Facts, progress and the outcome of a snapshot need no lease.
    assert not two.describe().asleep
    assert two.progress() == trainer_pb2.ProgressReply()
    assert two.await_snapshot("unknown").HasField("failure")
    two.wait_until_serving()
    two.hold(lease + 1)
    two.output(request(mixed_data()))
    assert not two.optim_step().HasField("failure")


def test_an_old_wake_that_arrives_after_a_later_sleep_changes_nothing(two):
    lease = newest(two) + 1
    two.hold(lease + 1)
    two.sleep()
    two.hold(lease)
    assert "a newer call came before" in refused(two.wake, newest=lease + 1)
    assert two.describe().asleep
    two.hold(lease + 2)
    two.wake()


def test_an_operation_that_was_applied_is_answered_again_whatever_became_of_the_lease(two):
    two.hold(lease := newest(two) + 1)
    two.wake()
    first = two.optim_step()  # refused: there are no gradients
    two.hold(lease + 1)
    two.sleep()
    two.hold(lease)
    two.seq_id -= 1
    assert two.optim_step() == first
    two.hold(lease + 2)
    two.wake()


def test_it_does_not_sleep_while_operations_are_under_way(two):
    two.hold(lease := newest(two) + 1)
    two.wake()
    second = two.header()
    header = common_pb2.OperationHeader(
        seq_id=second.seq_id + 1, previous_seq_id=second.seq_id, run_id=second.run_id
    )
    waiting = two.stub.OptimStep.future(
        trainer_pb2.OptimStepRequest(header=header), metadata=two.metadata, timeout=CALL_SECONDS
    )

    def busy() -> bool:
        nonlocal lease
        two.hold(lease := lease + 1)
        try:
            two.sleep()
        except grpc.RpcError as error:
            assert "operations are under way" in error.details()
            return True
        two.hold(lease := lease + 1)
        two.wake()
        return False

    wait_until(busy)
    assert not two.describe().asleep
    two.hold(lease := lease + 1)
    two.wake()  # it is awake and answers at once
    two.seq_id = second.seq_id - 1
    two.optim_step()
    two.seq_id += 1
    assert waiting.result(timeout=CALL_SECONDS).HasField("failure")


def test_a_trainer_that_is_not_leased_needs_no_token_and_does_not_sleep(models, tmp_path):
    with trainer_process(models["qwen3"], tmp_path) as client:
        client.output(request(mixed_data()))
        client.hold(1)
        assert "a newer call came before" in refused(client.sleep, newest=0)


def test_a_sleep_that_one_rank_cannot_do_leaves_all_awake(two, tmp_path):
    two.hold(newest(two) + 1)
    (tmp_path / "file").touch()
    reply = two.sleep(spill_folder=str(tmp_path / "file"))
    assert reply.failure.type == "storage_failed"
    assert not two.describe().asleep
    two.output(request(mixed_data()))
    assert not two.optim_step().HasField("failure")


def test_a_rank_that_dies_while_asleep_is_reported(models, tmp_path):
    with trainer_process(models["qwen3"], tmp_path, ranks=2, lease=1) as client:
        client.hold(2)
        client.sleep()
        other = next(pid for pid in group_members(client.process.pid) if pid != client.process.pid)
        os.kill(other, signal.SIGKILL)
        report = client.next_report()
        assert (report.error_type, report.error) == (
            "worker_died",
            "rank 1 was killed by SIGKILL",
        )
        assert client.process.wait(timeout=CALL_SECONDS) == 1


def test_spilled_state_leaves_the_memory_of_the_process(tmp_path):
    model = tmp_path / "model"
    write_tiny_model(model, seed=1, shape=TinyShape(hidden=512, ffn=2048))
    size = (model / "model.safetensors").stat().st_size
    assert size > 50 * 2**20
    with trainer_process(model, tmp_path, lease=1) as client:
        process = psutil.Process(client.process.pid)

        def private() -> int:
            return process.memory_full_info().uss

        client.output(request(mixed_data()))
        client.optim_step()
        client.output(request(mixed_data()))
        awake = private()
        client.hold(2)
        reply = client.sleep(spill_folder=str(tmp_path / "spilled"))
        assert reply.disk_bytes > 3.9 * size  # weights, gradients and two moments
        assert awake - private() > 0.95 * reply.disk_bytes
        client.hold(3)
        client.wake()
        assert not client.optim_step().HasField("failure")
