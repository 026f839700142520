from __future__ import annotations

import os
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from sampler_service.weights.handoff import open_handoff
from tandem.backends.memory import Available, MemoryPlan
from tandem.errors import LoadFailed
from tandem.v1 import common_pb2, trainer_pb2
from tandem.weights import Manifest, open_version
from tandem.weights.sums import sum_of
from tests.support.files import memory_files
from tests.support.local_trainer import SPEC, make, publish, train
from tests.support.waiting import PATIENCE, wait_until
from tests.support.worker_process import RUN
from trainer_service.backends.base import Export
from trainer_service.checkpoints import handoff as kept
from trainer_service.checkpoints import publish as publishing
from trainer_service.checkpoints import version_files
from trainer_service.service import publisher
from trainer_service.service.operations import Operations
from trainer_service.service.publisher import Publisher

MANIFEST = Manifest(
    version="v1", run_id="r", step=1, dtype="float32", tensors=0, created="", files=[]
)


def publish_early(operations: Operations, path: Path) -> trainer_pb2.PublishReply:
    version = common_pb2.WeightVersion(name=f"{RUN}/{path.name}", path=str(path), run_id=RUN)
    request = trainer_pb2.PublishRequest(version=version, handoff=True, early=True)
    reply = operations.publish(request)
    assert not reply.HasField("failure"), reply.failure
    return reply


def durable(operations: Operations, reply: trainer_pb2.PublishReply) -> trainer_pb2.PublishReply:
    request = trainer_pb2.PublishRequest(version=reply.version)
    return operations.publisher.await_published(request).result(timeout=PATIENCE)


def test_weights_are_handed_over_before_their_files_are_written(models, tmp_path, monkeypatch):
    """The files have the copy's numbers, also if the trainer goes on, and the copy is released."""
    write_files, go_on = publishing.write_files, Event()

    def write_later(*given: object, **named: object) -> object:
        assert go_on.wait(PATIENCE)
        return write_files(*given, **named)

    monkeypatch.setattr(publishing, "write_files", write_later)
    trainer = make(models["qwen3_moe"], None)
    reply = publish_early(trainer, tmp_path / "v1")
    assert not reply.durable and not (tmp_path / "v1").exists()
    copied = {name: tensor.clone() for name, tensor in open_handoff(reply.handoff)}
    offered = Manifest.model_validate_json(reply.handoff.manifest)
    train(trainer, 1)
    trainer.publisher.release(reply.version.name)
    go_on.set()
    ended = durable(trainer, reply)
    manifest = open_version(tmp_path / "v1")
    assert ended.durable and ended.bytes == manifest.bytes > 0
    assert (offered.sums, offered.canary) == (manifest.sums, manifest.canary)
    files = load_file(tmp_path / "v1" / "model.safetensors")
    assert files.keys() == copied.keys()
    for name, tensor in copied.items():
        np.testing.assert_array_equal(tensor.numpy(), files[name])
    assert memory_files() == 0


def test_a_trainer_sleeps_only_after_its_copy_is_written(models, tmp_path, monkeypatch):
    """A copy on a GPU would stay there."""
    write_files, began, go_on = publishing.write_files, Event(), Event()

    def write_later(*given: object, **named: object) -> object:
        began.set()
        assert go_on.wait(PATIENCE)
        return write_files(*given, **named)

    monkeypatch.setattr(publishing, "write_files", write_later)
    trainer = make(models["qwen3"], None)
    reply = publish_early(trainer, tmp_path / "v1")
    assert began.wait(PATIENCE)
    assert trainer.publisher.end_writing(), "memory of the host stays"
    on_gpu = Publisher(SimpleNamespace(backend=SimpleNamespace(device="cuda")))
    on_gpu._writing = trainer.publisher._writing
    monkeypatch.setattr(publisher, "_WRITTEN_WITHIN", 0.01)
    assert not on_gpu.end_writing()
    go_on.set()
    monkeypatch.setattr(publisher, "_WRITTEN_WITHIN", PATIENCE)
    assert on_gpu.end_writing() and (tmp_path / "v1").exists()
    trainer.publisher.release(reply.version.name)


def test_a_copy_whose_files_cannot_be_written_is_no_version(models, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    trainer = make(models["qwen3"], None)
    with monkeypatch.context() as patched:
        patched.setattr(version_files, "write_tensors", full)
        ended = durable(trainer, publish_early(trainer, tmp_path / "v1"))
    assert (ended.failure.type, ended.durable) == ("storage_full", False)
    assert list(tmp_path.iterdir()) == [] and not trainer.publisher.newest
    reply = publish_early(trainer, tmp_path / "v1")
    assert durable(trainer, reply).durable
    open_version(tmp_path / "v1")
    trainer.publisher.release()


def test_the_copy_has_what_the_files_have_and_the_manifest_its_sums(models, tmp_path: Path):
    """Also for fused experts, which have other names in files than in the model."""
    import torch

    trainer = make(models["qwen3_moe"], None)
    reply = publish(trainer, tmp_path / "v1", handoff=True)
    files = load_file(tmp_path / "v1" / "model.safetensors")
    copied = dict(open_handoff(reply.handoff))
    assert copied.keys() == files.keys()
    for name, tensor in copied.items():
        np.testing.assert_array_equal(tensor.numpy(), files[name])
    manifest = open_version(tmp_path / "v1")
    assert manifest.sums == {
        name: sum_of(t, torch.float32, name=name) for name, t in copied.items()
    }
    trainer.publisher.release()


def test_tensors_of_all_shapes_and_types_are_what_they_were():
    """Buffers may be single numbers or empty, and lie in memory in any way."""
    import torch

    tensors = {
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "number": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]),
        "with gaps": torch.arange(15.0).view(5, 3).bfloat16()[:, ::2],
        "repeated": torch.ones(2, dtype=torch.float64).expand(3, 2),
    }
    exports = [Export(name, tuple(t.shape), t.dtype, name) for name, t in tensors.items()]
    backend = SimpleNamespace(exports=lambda: exports, plan=None, device="cpu", dtype="float32")
    copy = kept.keep_copy("v1", backend)
    for _ in copy.copying(iter(tensors.items())):
        pass
    found = dict(open_handoff(copy.offer(MANIFEST, on_deadline=lambda: None)))
    copy.close()
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_the_copy_is_freed_by_its_release_and_by_the_next_version(models, tmp_path: Path):
    """A reader keeps an opened copy. A file that replaced the copy's is refused."""
    trainer = make(models["qwen3"], None)
    first = publish(trainer, tmp_path / "v1", handoff=True).handoff
    opened = open_handoff(first)
    second = publish(trainer, tmp_path / "v2", handoff=True).handoff
    trainer.publisher.release(first.name)
    assert memory_files() == 2, "one has a reader, and one is newer"
    files = load_file(tmp_path / "v1" / "model.safetensors")
    for name, tensor in opened:
        np.testing.assert_array_equal(tensor.numpy(), files[name])
    del opened, tensor
    assert memory_files() == 1
    trainer.publisher.release(second.name)
    assert memory_files() == 0
    with pytest.raises(LoadFailed, match="not in the trainer's memory"):
        open_handoff(second)
    with (tmp_path / "v1" / "model.safetensors").open("rb") as another:
        second.host.file = another.fileno()
        with pytest.raises(LoadFailed, match="any more"):
            open_handoff(second)
    os.mkfifo(tmp_path / "pipe")  # without a writer: opening it would block forever
    second.host.file = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(LoadFailed, match="any more"):
        open_handoff(second)
    os.close(second.host.file)


def test_a_copy_that_nobody_releases_is_freed_at_its_deadline(models, tmp_path, monkeypatch):
    """As when the gateway was killed between publishing and loading."""
    trainer = make(models["qwen3"], None)
    monkeypatch.setattr(kept, "KEPT_SECONDS", 0.01)
    assert publish(trainer, tmp_path / "v1", handoff=True).HasField("handoff")
    wait_until(lambda: memory_files() == 0, what="the copy is freed")


def test_a_copy_whose_reader_would_lose_it_waits_for_its_release(models, tmp_path, monkeypatch):
    """As on a GPU, where memory must not be freed while another process has it open."""
    monkeypatch.setattr(kept.KeptCopy, "outlives_close", False)
    trainer = make(models["qwen3"], None)
    first = publish(trainer, tmp_path / "v1", handoff=True).handoff
    second = publish(trainer, tmp_path / "v2", handoff=True).handoff
    trainer.publisher.release()
    assert memory_files() == 2
    trainer.publisher.release(first.name)
    trainer.publisher.release(second.name)
    assert memory_files() == 0


def test_nothing_is_kept_that_was_not_asked_for_or_has_no_room(models, tmp_path, monkeypatch):
    trainer = make(models["qwen3"], None)
    assert not publish(trainer, tmp_path / "v1").HasField("handoff")
    with monkeypatch.context() as patched:
        patched.setattr(kept, "free_memory_bytes", lambda: 1000)
        assert not publish(trainer, tmp_path / "v2", handoff=True).HasField("handoff")
    with monkeypatch.context() as patched:
        patched.setattr(kept.KeptCopy, "_copy", _out_of_memory)
        assert not publish(trainer, tmp_path / "v3", handoff=True).HasField("handoff")
    adapters = make(models["qwen3"], SPEC)
    assert not publish(adapters, tmp_path / "v4", handoff=True).HasField("handoff")
    assert memory_files() == 0


def test_copies_that_nobody_released_are_no_room_for_the_next_one(monkeypatch):
    """The plan leaves room for three copies of 512 bytes."""
    import torch

    export = Export("w", (4,), torch.float32, "w")  # 512 bytes, because of alignment
    plan = MemoryPlan(1, False, {"weights": 1000}, Available(device=2600))
    backend = SimpleNamespace(exports=lambda: [export], plan=plan, device="cpu", dtype="float32")
    held: list[kept.KeptCopy] = []
    for _ in range(3):
        copy = kept.keep_copy("v1", backend, held=sum(each.bytes for each in held))
        assert copy is not None and copy.bytes == 512
        held.append(copy)
    assert kept.keep_copy("v2", backend, held=sum(each.bytes for each in held)) is None
    held.pop().close()
    last = kept.keep_copy("v3", backend, held=sum(each.bytes for each in held))
    assert last is not None
    for each in (*held, last):
        each.close()


def test_a_version_that_could_not_be_written_is_not_handed_over(models, tmp_path, monkeypatch):
    trainer = make(models["qwen3"], None)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publishing, "write_tensors", full)
    with pytest.raises(AssertionError, match="storage_full"):
        publish(trainer, tmp_path / "v1", handoff=True)
    assert memory_files() == 0


def test_its_message_survives_the_way_to_an_engine_in_its_own_process():
    import pickle

    message = common_pb2.Handoff(name="v1", tensors=[common_pb2.Handoff.Tensor(shape=[2, 3])])
    assert pickle.loads(pickle.dumps(message)) == message


def _out_of_memory(*_: object) -> None:
    raise RuntimeError("out of memory")
