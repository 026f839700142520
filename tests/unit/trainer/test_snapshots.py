from __future__ import annotations

import errno
import shutil
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tandem.v1 import common_pb2, trainer_pb2
from tandem.weights import FileEntry, open_version
from tests.support.local_trainer import (
    SPEC,
    data_of,
    forward_backward,
    load,
    make,
    publish,
    save,
    weights,
)
from tests.support.worker_process import RUN
from trainer_service.checkpoints import shards, storage, training_state
from trainer_service.service.operations import Operations

ADAMW = trainer_pb2.AdamWParams(
    learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01
)
DIMUON = trainer_pb2.DiMuonParams(learning_rate=1e-2, beta1=0.9)


def step(
    operations: Operations, number: int, *, snapshot: Path | None = None, optimizer: str = "adamw"
) -> trainer_pb2.OptimStepReply:
    """A batch and a step, different for each number."""
    forward_backward(operations, data_of(number))
    header = common_pb2.OperationHeader(run_id=RUN, seq_id=2 * number)
    params = {"adamw": ADAMW} if optimizer == "adamw" else {"dimuon": DIMUON}
    request = trainer_pb2.OptimStepRequest(header=header, **params)
    request.snapshot = str(snapshot or "")
    return operations.optim_step(request)


def written(operations: Operations, path: Path) -> trainer_pb2.AwaitSnapshotReply:
    return operations.snapshots.result(str(path)).result(timeout=60)


def restore(operations: Operations, path: Path) -> trainer_pb2.RestoreReply:
    return operations.restore(trainer_pb2.RestoreRequest(path=str(path)))


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("lora", [None, SPEC], ids=["full", "lora"])
@pytest.mark.parametrize("optimizer", ["adamw", "dimuon"])
def test_a_restored_trainer_goes_on_bit_by_bit(models, tmp_path, lora, optimizer):
    path = tmp_path / "run" / "s1"
    undisturbed = make(models["qwen3"], lora, optimizer=optimizer)
    for number in (1, 2, 3, 4):
        snapshot = path if number == 2 else None
        assert not step(undisturbed, number, snapshot=snapshot, optimizer=optimizer).HasField(
            "failure"
        )
    reply = written(undisturbed, path)
    assert (reply.step, reply.seq_id) == (2, 4)
    assert reply.bytes == sum(f.stat().st_size for f in path.iterdir() if f.suffix != ".json")

    other = make(models["qwen3"], lora, optimizer=optimizer)
    assert restore(other, path).step == 2
    for number in (3, 4):
        step(other, number, optimizer=optimizer)
    assert equal(weights(other), weights(undisturbed))


def test_a_step_with_a_snapshot_needs_no_files_of_the_base_model(models, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(models["qwen3"], base)
    operations = make(base, SPEC)
    base.rename(tmp_path / "moved")
    path = tmp_path / "run" / "s1"
    assert not step(operations, 1, snapshot=path).HasField("failure")
    assert not written(operations, path).HasField("failure")

    other = make(tmp_path / "moved", SPEC)
    assert restore(other, path).step == 1
    assert equal(weights(other), weights(operations))


def test_a_checkpoint_restores_a_trainer_as_a_snapshot_does(models, tmp_path):
    undisturbed = make(models["qwen3"], None)
    step(undisturbed, 1)
    assert save(undisturbed, tmp_path / "c1").at_step
    for number in (2, 3):
        step(undisturbed, number)
    other = make(models["qwen3"], None)
    assert restore(other, tmp_path / "c1").step == 1
    for number in (2, 3):
        step(other, number)
    assert equal(weights(other), weights(undisturbed))


def test_a_checkpoint_says_whether_it_is_the_whole_state(models, tmp_path):
    operations = make(models["qwen3"], None)
    assert save(operations, tmp_path / "c0").at_step
    forward_backward(operations, data_of(1))
    assert not save(operations, tmp_path / "c1").at_step, "gradients are held"
    assert not load(operations, tmp_path / "c0").HasField("failure")
    assert save(operations, tmp_path / "c2").at_step
    operations.note_refused("a batch was too large")
    assert not save(operations, tmp_path / "c3").at_step, "the next step is to be refused"
    forward_backward(operations, data_of(1), forward_only=True)
    assert operations.optim_step(trainer_pb2.OptimStepRequest(adamw=ADAMW)).HasField("failure")
    assert save(operations, tmp_path / "c4").at_step


def test_training_goes_on_while_a_snapshot_is_written_and_does_not_change_it(
    models, tmp_path, monkeypatch
):
    write = training_state.write_shards
    trained_on = threading.Event()

    def late(*arguments: object, **more: object) -> list[FileEntry]:
        assert trained_on.wait(timeout=60)
        return write(*arguments, **more)

    monkeypatch.setattr(training_state, "write_shards", late)
    operations = make(models["qwen3"], None)
    step(operations, 1, snapshot=tmp_path / "s1")
    after_first = weights(operations)
    step(operations, 2)
    trained_on.set()
    assert written(operations, tmp_path / "s1").step == 1

    other = make(models["qwen3"], None)
    restore(other, tmp_path / "s1")
    assert equal(weights(other), after_first)


def test_a_step_that_is_refused_takes_no_snapshot(models, tmp_path):
    operations = make(models["qwen3"], None)
    header = common_pb2.OperationHeader(run_id=RUN, seq_id=1)
    request = trainer_pb2.OptimStepRequest(
        header=header, adamw=ADAMW, snapshot=str(tmp_path / "run" / "s1")
    )
    assert operations.optim_step(request).failure.type == "no_gradients"
    step(operations, 1)
    bad = trainer_pb2.AdamWParams(learning_rate=float("nan"))
    request = trainer_pb2.OptimStepRequest(
        header=header, adamw=bad, snapshot=str(tmp_path / "run" / "s2")
    )
    assert operations.optim_step(request).failure.type == "optimizer_setting"
    assert not any(tmp_path.rglob("*"))


def test_a_full_disk_stops_the_snapshot_and_not_the_training(models, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(training_state, "write_shards", full)
    operations = make(models["qwen3"], None)
    assert step(operations, 1, snapshot=tmp_path / "s1").step == 1
    assert written(operations, tmp_path / "s1").failure.type == "storage_full"
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    assert step(operations, 2, snapshot=tmp_path / "s2").step == 2
    assert written(operations, tmp_path / "s2").failure.type == "storage_full"
    assert not any(tmp_path.iterdir())


def test_a_fault_while_a_snapshot_is_written_is_told(models, tmp_path, monkeypatch):
    def odd(*_: object, **__: object) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(training_state, "write_shards", odd)
    operations = make(models["qwen3"], None)
    assert step(operations, 1, snapshot=tmp_path / "s1").step == 1
    assert "RuntimeError" in written(operations, tmp_path / "s1").failure.message


def test_a_damaged_snapshot_is_refused_and_leaves_the_trainer_as_it_was(models, tmp_path):
    operations = make(models["qwen3"], None)
    step(operations, 1, snapshot=tmp_path / "s1")
    written(operations, tmp_path / "s1")
    file = next(tmp_path.glob("s1/*.safetensors"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    other = make(models["qwen3"], None)
    before = weights(other)
    assert restore(other, tmp_path / "s1").failure.type == "checkpoint_damaged"
    assert restore(other, tmp_path / "s0").failure.type == "checkpoint_damaged"
    assert equal(weights(other), before)


def test_reading_is_told_in_pieces_so_that_a_slow_disk_does_not_seem_to_stand_still(
    models, tmp_path, monkeypatch
):
    operations = make(models["qwen3"], None)
    step(operations, 1, snapshot=tmp_path / "s1")
    written(operations, tmp_path / "s1")
    monkeypatch.setattr("tandem.weights.manifest._BLOCK_BYTES", 4096)
    monkeypatch.setattr(shards, "_PIECE", 4096)
    told: dict[str, list[int]] = {"verified": [], "loaded": []}

    class Recorded(storage.ByteCount):
        def __init__(self, name: str) -> None:
            self.name = name
            super().__init__()

        def __setattr__(self, attribute: str, value: object) -> None:
            if attribute == "bytes":
                told[self.name].append(value)
            super().__setattr__(attribute, value)

    monkeypatch.setattr(training_state, "ByteCount", lambda: Recorded("verified"))
    monkeypatch.setattr(shards, "ByteCount", lambda: Recorded("loaded"))
    size = sum(file.stat().st_size for file in tmp_path.glob("s1/*.safetensors"))
    other = make(models["qwen3"], None)
    assert not restore(other, tmp_path / "s1").HasField("failure")
    assert equal(weights(other), weights(operations))
    assert len(told["verified"]) > size // 4096
    loaded = told["loaded"]
    assert loaded[-1] > size // 2
    assert max(after - before for before, after in pairwise(loaded)) <= 4096


# --- Operations of a dead trainer that nobody heard of ---------------------------------------


def test_a_publish_that_is_delivered_again_gives_the_version_that_is_there(models, tmp_path):
    def request(operation: str) -> trainer_pb2.PublishRequest:
        return trainer_pb2.PublishRequest(
            header=common_pb2.OperationHeader(operation_id=operation, run_id=RUN),
            version=common_pb2.WeightVersion(
                name=f"{RUN}/v1", path=str(tmp_path / "v1"), run_id=RUN
            ),
        )

    first = make(models["qwen3"], None).publish(request("r:1"))
    other = make(models["qwen3"], None)
    again = other.publish(request("r:1"))
    assert not first.HasField("failure")
    assert (again.version, again.bytes) == (first.version, first.bytes)
    assert "exists already" in other.publish(request("r:2")).failure.message


def test_a_publish_goes_on_where_a_trainer_died_in_the_middle_of_it(models, tmp_path):
    (tmp_path / ".partial-v1").mkdir()
    (tmp_path / ".partial-v1" / "model.safetensors").write_bytes(b"half of it")
    publish(make(models["qwen3"], None), tmp_path / "v1")
    assert open_version(tmp_path / "v1").step == 0


def test_a_snapshot_is_asked_for_in_vain_while_another_is_written(models, tmp_path, monkeypatch):
    write, go_on = training_state.write_shards, threading.Event()

    def late(*arguments: object, **more: object) -> list[FileEntry]:
        assert go_on.wait(timeout=60)
        return write(*arguments, **more)

    monkeypatch.setattr(training_state, "write_shards", late)
    operations = make(models["qwen3"], None)
    step(operations, 1, snapshot=tmp_path / "s1")
    step(operations, 2, snapshot=tmp_path / "s2")
    assert "not the newest" in written(operations, tmp_path / "s2").failure.message
    go_on.set()
    assert written(operations, tmp_path / "s1").step == 1


def test_a_save_that_is_delivered_again_gives_the_checkpoint_that_is_there(models, tmp_path):
    def request(seq_id: int) -> trainer_pb2.SaveCheckpointRequest:
        header = common_pb2.OperationHeader(run_id=RUN, seq_id=seq_id)
        return trainer_pb2.SaveCheckpointRequest(header=header, path=str(tmp_path / "c1"))

    first = make(models["qwen3"], None).save_checkpoint(request(7))
    other = make(models["qwen3"], None)
    again = other.save_checkpoint(request(7))
    assert first.bytes and (again.step, again.bytes) == (first.step, first.bytes)
    assert other.save_checkpoint(request(8)).failure.type == "name_taken"


def test_a_version_tells_which_steps_were_made_with_it_after_a_restore_too(models, tmp_path):
    operations = make(models["qwen3"], None)
    publish(operations, tmp_path / "v1")
    step(operations, 1, snapshot=tmp_path / "s1")
    written(operations, tmp_path / "s1")
    other = make(models["qwen3"], None)
    other.restore(trainer_pb2.RestoreRequest(path=str(tmp_path / "s1"), weight_version=f"{RUN}/v1"))
    assert step(other, 2).weight_version == f"{RUN}/v1"


def take(operations: Operations, path: Path) -> trainer_pb2.AwaitSnapshotReply:
    operations.take_snapshot(trainer_pb2.TakeSnapshotRequest(path=str(path)))
    return written(operations, path)


@pytest.mark.parametrize("lora", [None, SPEC], ids=["full", "lora"])
def test_a_snapshot_between_operations_is_of_the_newest_step_without_later_gradients(
    models, tmp_path, lora
):
    undisturbed = make(models["qwen3"], lora)
    for number in (1, 2):
        step(undisturbed, number)
    forward_backward(undisturbed, data_of(3))
    reply = take(undisturbed, tmp_path / "s2")
    assert (reply.step, reply.seq_id) == (2, 4)
    header = common_pb2.OperationHeader(run_id=RUN, seq_id=6)
    undisturbed.optim_step(trainer_pb2.OptimStepRequest(header=header, adamw=ADAMW))

    other = make(models["qwen3"], lora)
    request = trainer_pb2.RestoreRequest(path=str(tmp_path / "s2"), seq_id=4)
    assert other.restore(request).step == 2
    assert take(other, tmp_path / "s2 again").seq_id == 4
    step(other, 3)
    assert equal(weights(other), weights(undisturbed))


def test_a_refused_step_leaves_the_snapshot_where_the_weights_came_from(models, tmp_path):
    operations = make(models["qwen3"], None)
    step(operations, 1)
    operations.note_refused("a batch was too large")
    assert step(operations, 2).HasField("failure")
    assert take(operations, tmp_path / "s1").seq_id == 2


def test_a_snapshot_that_cannot_be_taken_says_why(models, tmp_path):
    operations = make(models["qwen3"], None)
    step(operations, 1)
    (tmp_path / "file").write_text("")
    assert take(operations, tmp_path / "file" / "s1").HasField("failure")
