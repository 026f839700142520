from __future__ import annotations

import errno
import json
import resource
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tandem import errors
from tandem.v1 import common_pb2, trainer_pb2
from tandem.weights import open_version
from tests.support.files import watch_syncs
from tests.support.local_trainer import load, make_rank, optim_step, plain, train
from tests.support.losses.batches import mixed_data
from tests.support.trainer_worker import request
from tests.support.worker_process import RUN
from trainer_service.backends.base import Export
from trainer_service.checkpoints import (
    publish,
    shards,
    storage,
    training_state,
    version_files,
)
from trainer_service.compute.control_group import ControlGroup
from trainer_service.service.operations import Operations


def publish_to(operations: Operations, path: Path) -> trainer_pb2.PublishReply:
    version = common_pb2.WeightVersion(name=f"{RUN}/{path.name}", path=str(path), run_id=RUN)
    return operations.publish(trainer_pb2.PublishRequest(version=version))


def save_to(operations: Operations, path: Path) -> trainer_pb2.SaveCheckpointReply:
    return operations.save_checkpoint(trainer_pb2.SaveCheckpointRequest(path=str(path)))


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# --- Publishing ------------------------------------------------------------------------------


def test_a_disk_that_is_full_before_the_write_is_told_with_sizes(models, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: usage)
    reply = publish_to(Operations(make_rank(models["qwen3"])), tmp_path / "run" / "v1")
    assert reply.failure.type == "storage_full"
    assert "1000 are free" in reply.failure.message
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_up_during_the_write_leaves_nothing(models, tmp_path, monkeypatch):
    operations = Operations(make_rank(models["qwen3"]))
    with monkeypatch.context() as patched:
        patched.setattr(publish, "write_tensors", full_disk)
        assert publish_to(operations, tmp_path / "v1").failure.type == "storage_full"
    assert list(tmp_path.iterdir()) == []
    assert not publish_to(operations, tmp_path / "v1").HasField("failure")
    open_version(tmp_path / "v1")


@pytest.mark.parametrize("write", [publish_to, save_to])
def test_what_is_saved_survives_a_power_failure_with_all_folders_on_the_way(
    models, tmp_path, monkeypatch, write
):
    operations = Operations(make_rank(models["qwen3"]))
    final = tmp_path / "data" / "weights" / "run" / "v1"
    synced = watch_syncs(monkeypatch)
    assert not write(operations, final).HasField("failure")
    assert {tmp_path, *final.parents} - {*tmp_path.parents} <= {*synced}
    names = {path.name.removesuffix(".tmp") for path in synced}  # synced, and then renamed
    assert {file.name for file in final.iterdir()} <= names


@pytest.fixture
def small_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_may_not_grow_so_large_is_the_error_of_the_kernel(tmp_path, small_files):
    file = storage.HashedFile(tmp_path / "a.safetensors", progress=storage.ByteCount())
    with pytest.raises(OSError) as caught, closing(file):
        publish.write_tensors(
            file,
            [Export("a", (100_000,), torch.float32, unit="a")],
            iter([("a", torch.zeros(100_000))]),
        )
    assert caught.value.errno == errno.EFBIG


def test_so_it_is_in_the_middle_of_a_checkpoint(tmp_path, small_files):
    with pytest.raises(OSError) as caught:
        training_state.write_shards({"a": torch.zeros(100_000)}, tmp_path / "a", group=None)
    assert caught.value.errno == errno.EFBIG


def test_a_tensor_of_a_type_that_no_version_has_is_refused_before_anything_is_written(
    models, tmp_path, monkeypatch
):
    trainer = make_rank(models["qwen3"])
    odd = Export("masks", (2,), torch.uint16, "masks")
    with monkeypatch.context() as patched:
        patched.setattr(trainer.backend, "exports", lambda: [odd])
        failure = publish_to(Operations(trainer), tmp_path / "v1").failure
    assert failure.type == "publish_failed" and "masks is torch.uint16" in failure.message
    assert not any(tmp_path.iterdir())
    assert not publish_to(Operations(trainer), tmp_path / "v1").HasField("failure")


def test_other_failures_of_the_disk_are_publish_failed(models, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    reply = publish_to(Operations(make_rank(models["qwen3"])), tmp_path / "file" / "v1")
    assert reply.failure.type == "publish_failed"


def test_a_version_is_never_written_twice(models, tmp_path):
    operations = Operations(make_rank(models["qwen3"]))
    assert not publish_to(operations, tmp_path / "v1").HasField("failure")
    before = (tmp_path / "v1" / "manifest.json").read_bytes()
    assert publish_to(operations, tmp_path / "v1").failure.type == "publish_failed"
    assert (tmp_path / "v1" / "manifest.json").read_bytes() == before


def test_the_failure_of_another_rank_reaches_rank_0():
    class TwoRanks(ControlGroup):
        def gather(self, payload: bytes) -> list[bytes]:
            failed = {"type": "storage_full", "message": "rank 1: the disk is full"}
            return [payload, json.dumps(failed).encode()]

    control = TwoRanks(rank=0, size=2, group=None)
    with pytest.raises(errors.StorageFull, match="rank 1"):
        storage.agree(control, lambda: [], what="v1", needed=1)


def test_a_version_of_several_files_is_the_model(models, tmp_path, monkeypatch):
    trainer = make_rank(models["qwen3_moe"])  # its files differ in layout from its modules
    publish_to(Operations(trainer), tmp_path / "one")
    most = max(each.bytes for each in trainer.backend.exports())
    monkeypatch.setattr(version_files, "FILE_BYTES", most)
    assert not publish_to(Operations(trainer), tmp_path / "many").HasField("failure")
    manifest = open_version(tmp_path / "many")
    files = [entry for entry in manifest.files if entry.name.endswith(".safetensors")]
    count = len(files)
    assert count > 2
    assert {entry.name for entry in files} == {
        f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
    }
    assert max(entry.bytes for entry in files) < most + 2**16  # a header
    one, many = (plain(tmp_path / name).state_dict() for name in ("one", "many"))
    assert one.keys() == many.keys()
    assert all(torch.equal(tensor, many[name]) for name, tensor in one.items())


def test_several_threads_write_the_files_of_one_rank(models, tmp_path, monkeypatch):
    trainer = make_rank(models["qwen3"])
    assert trainer.backend.exports_stay
    assert not publish_to(Operations(trainer), tmp_path / "one").HasField("failure")
    monkeypatch.setattr(publish, "writers_of", lambda device, exports: 3)
    assert not publish_to(Operations(trainer), tmp_path / "many").HasField("failure")
    one, many = (open_version(tmp_path / name) for name in ("one", "many"))
    assert sum(entry.name.endswith(".safetensors") for entry in many.files) == 3
    assert many.sums == one.sums
    weights_of = (plain(tmp_path / name).state_dict() for name in ("one", "many"))
    assert all(map(torch.equal, *(each.values() for each in weights_of)))


# --- Checkpoints -----------------------------------------------------------------------------


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.backend.parameters().items()}


def test_a_checkpoint_from_before_the_first_step_loads_with_its_optimizer(models, tmp_path):
    trainer = make_rank(models["qwen3"])
    save_to(Operations(trainer), tmp_path / "a")
    train(Operations(trainer), 1)
    assert load(Operations(trainer), tmp_path / "a").step == 0
    assert trainer.backend.optimizer.state(create=False) == {}


def test_loading_drops_the_gradients_held(models, tmp_path):
    operations = Operations(make_rank(models["qwen3"]))
    save_to(operations, tmp_path / "a")
    payload = request(mixed_data()).SerializeToString()
    operations.forward_backward(trainer_pb2.ForwardBackwardRequest(payload=payload))
    load(operations, tmp_path / "a")
    step = optim_step(operations)
    assert step.failure.type == "no_gradients"


def test_only_a_load_that_succeeds_forgets_that_a_forward_backward_was_refused(models, tmp_path):
    operations = Operations(make_rank(models["qwen3"]))
    save_to(operations, tmp_path / "a")
    operations.note_refused("no such loss")
    assert load(operations, tmp_path / "none").HasField("failure")
    step = optim_step(operations)
    assert step.failure.type == "gradients_incomplete" and "no such loss" in step.failure.message
    operations.note_refused("no such loss")
    assert not load(operations, tmp_path / "a").HasField("failure")
    train(operations, 1)


def test_a_damaged_checkpoint_changes_nothing(models, tmp_path):
    trainer = make_rank(models["qwen3"])
    operations = Operations(trainer)
    save_to(operations, tmp_path / "a")
    train(operations, 1)
    before = weights(trainer)
    (data,) = (tmp_path / "a").glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert load(operations, tmp_path / "a").failure.type == "checkpoint_damaged"
    data.unlink()
    assert load(operations, tmp_path / "a").failure.type == "checkpoint_damaged"
    assert load(operations, tmp_path / "none").failure.type == "checkpoint_damaged"
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


def test_a_checkpoint_of_another_model_is_refused(models, tmp_path):
    save_to(Operations(make_rank(models["llama"])), tmp_path / "a")
    reply = load(Operations(make_rank(models["qwen3"])), tmp_path / "a")
    assert reply.failure.type == "checkpoint_mismatch"
    assert "of another model (LlamaForCausalLM)" in reply.failure.message
    assert "LlamaForCausalLM" in reply.failure.message


def test_a_checkpoint_is_not_overwritten(models, tmp_path):
    operations = Operations(make_rank(models["qwen3"]))
    save_to(operations, tmp_path / "a")
    assert save_to(operations, tmp_path / "a").failure.type == "name_taken"


def test_a_checkpoint_is_hashed_while_it_is_written_and_not_read_again(
    models, tmp_path, monkeypatch
):
    def read(path: Path) -> None:
        raise AssertionError(f"{path} was read")

    operations = Operations(make_rank(models["qwen3"]))
    with monkeypatch.context() as patched:
        patched.setattr(training_state, "checksum_file", read)
        assert not save_to(operations, tmp_path / "a").HasField("failure")
    record = training_state.check(tmp_path / "a", operations.trainer, optimizer=False)
    assert {entry.name for entry in record.files} == {"rank-0-0.safetensors"}


def test_files_have_a_bounded_size_unless_a_tensor_is_larger(models, tmp_path, monkeypatch):
    trainer = make_rank(models["qwen3"])
    operations = Operations(trainer)
    sizes = [each.numel() * 4 for each in trainer.backend.parameters().values()]
    most = sorted(sizes)[-2] + 1
    monkeypatch.setattr(shards, "FILE_BYTES", most)
    save_to(operations, tmp_path / "a")
    record = training_state.check(tmp_path / "a", trainer, optimizer=False)
    files = [entry for entry in record.files if entry.name.endswith(".safetensors")]
    assert len(files) >= sum(sizes) // most
    overhead = 4096 * len(sizes)  # each tensor has a header
    assert sorted(entry.bytes for entry in files)[-2] <= most + overhead
    before = weights(trainer)
    for tensor in trainer.backend.parameters().values():
        tensor.zero_()
    assert not load(operations, tmp_path / "a").HasField("failure")
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


def test_a_disk_that_fills_up_during_a_checkpoint_leaves_nothing(models, tmp_path, monkeypatch):
    operations = Operations(make_rank(models["qwen3"]))
    with monkeypatch.context() as patched:
        patched.setattr("trainer_service.checkpoints.training_state.dcp.save", full_disk)
        assert save_to(operations, tmp_path / "a").failure.type == "storage_full"
    assert list(tmp_path.iterdir()) == []
    assert not save_to(operations, tmp_path / "a").HasField("failure")
