from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from sampler_service.weights.files import read_tensors, verified_tensors, weights_files
from tandem.errors import LoadFailed
from tandem.v1 import trainer_pb2
from tandem.weights import Manifest, checksum_file, open_version
from tests.support.local_trainer import make, publish, train
from tests.support.worker_process import RUN
from trainer_service.checkpoints import publish as publishing
from trainer_service.service.operations import Operations

pytestmark = pytest.mark.usefixtures("group")


def read(path: Path) -> dict[str, torch.Tensor]:
    """Read a version as an engine does."""
    manifest = open_version(path)
    return {
        name: tensor.clone()
        for file in weights_files(path)
        for name, tensor in verified_tensors(file, manifest, lambda: None)
    }


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def flip_a_bit(file: Path, *, at: float = 0.6) -> None:
    content = bytearray(file.read_bytes())
    content[int(len(content) * at)] ^= 1
    file.write_bytes(content)


@pytest.fixture
def trainer(model: Path) -> Operations:
    return make(model, None, dtype="bfloat16")


@pytest.fixture
def delta(trainer: Operations, tmp_path: Path) -> Path:
    """The delta of a small step after `v1`. `whole` has the whole version."""
    publish(trainer, tmp_path / "v1")
    train(trainer, 1, lr=1e-6)
    publish(trainer, tmp_path / "whole")
    reply = publish(trainer, tmp_path / "v2", delta_of=f"{RUN}/v1")
    assert reply.delta_of == f"{RUN}/v1"
    return tmp_path / "v2"


def test_a_delta_is_small_and_read_as_the_whole_version_that_it_stands_for(delta: Path):
    whole, manifest = open_version(delta.parent / "whole"), open_version(delta)
    assert [e for e in manifest.files if e.name.endswith("safetensors")] == [
        e for e in whole.files if e.name.endswith("safetensors")
    ]
    assert not list(delta.glob("*.safetensors")) and list(delta.glob("*.patch"))
    assert manifest.written_bytes < manifest.bytes / 5 and manifest.bytes == whole.bytes
    assert manifest.written_bytes == sum(f.stat().st_size for f in delta.iterdir()) - (
        (delta / "manifest.json").stat().st_size
    )
    before, after = dict(read_tensors(delta.parent / "v1")), read(delta)
    assert equal(after, dict(read_tensors(delta.parent / "whole")))
    assert equal(after, dict(read_tensors(delta)))
    assert not equal(before, after)


def test_of_several_files_each_has_its_patch(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "FILE_BYTES", 2**16)
    publish(trainer, tmp_path / "v1")
    publish(trainer, tmp_path / "same", delta_of=f"{RUN}/v1")
    train(trainer, 1, lr=1e-6)
    publish(trainer, tmp_path / "v2", delta_of=f"{RUN}/v1")
    publish(trainer, tmp_path / "whole")
    assert equal(read(tmp_path / "v2"), dict(read_tensors(tmp_path / "whole")))
    assert equal(read(tmp_path / "same"), dict(read_tensors(tmp_path / "v1")))
    assert {file.stat().st_size for file in (tmp_path / "same").glob("*.patch")} == {0}


def test_a_large_step_writes_no_more_than_a_whole_version(trainer, tmp_path):
    publish(trainer, tmp_path / "v1")
    train(trainer, 3, lr=0.1)
    publish(trainer, tmp_path / "whole")
    reply = publish(trainer, tmp_path / "v2", delta_of=f"{RUN}/v1")
    assert reply.written_bytes < reply.bytes * 1.01
    assert equal(read(tmp_path / "v2"), dict(read_tensors(tmp_path / "whole")))


def _gone(base: Path) -> None:
    shutil.rmtree(base)


def _another(base: Path) -> None:
    manifest = Manifest.model_validate_json((base / "manifest.json").read_bytes())
    changed = manifest.model_copy(update={"version": f"{RUN}/v9"})
    (base / "manifest.json").write_text(changed.model_dump_json())


def _truncated(base: Path) -> None:
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2])


def _of_other_tensors(base: Path) -> None:
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"model.norm", b"model.nrom"))
    manifest = Manifest.model_validate_json((base / "manifest.json").read_bytes())
    files = [checksum_file(base / entry.name) for entry in manifest.files]
    (base / "manifest.json").write_text(
        manifest.model_copy(update={"files": files}).model_dump_json()
    )


@pytest.mark.parametrize("change", [_gone, _another, _truncated, _of_other_tensors])
def test_without_a_version_to_compare_with_all_files_are_whole(trainer, tmp_path, change):
    publish(trainer, tmp_path / "v1")
    change(tmp_path / "v1")
    reply = publish(trainer, tmp_path / "v2", delta_of=f"{RUN}/v1")
    assert reply.delta_of == "" and reply.written_bytes == reply.bytes
    assert (tmp_path / "v2" / "model.safetensors").is_file()


def test_nothing_is_a_delta_of_a_delta(trainer, delta):
    reply = publish(trainer, delta.parent / "v3", delta_of=f"{RUN}/v2")
    assert reply.delta_of == ""


def test_a_delta_that_was_published_before_its_trainer_died_is_told_again(trainer, tmp_path):
    publish(trainer, tmp_path / "v1")
    request = trainer_pb2.PublishRequest(delta_of=f"{RUN}/v1")
    request.header.operation_id = "op-1"
    request.version.name, request.version.path = f"{RUN}/v2", str(tmp_path / "v2")
    first, again = trainer.publish(request), trainer.publish(request)
    assert first.delta_of == again.delta_of == f"{RUN}/v1"
    assert first.written_bytes == again.written_bytes < first.bytes


# --- Refusals of an engine --------------------------------------------------------------------


def test_a_bit_of_the_patch_is_missed(delta: Path):
    flip_a_bit(delta / "model.safetensors.patch")
    with pytest.raises(LoadFailed, match=r"v2: model\.safetensors\.patch is damaged"):
        read(delta)


def test_a_bit_of_the_version_before_is_missed(delta: Path):
    flip_a_bit(delta.parent / "v1" / "model.safetensors")
    with pytest.raises(LoadFailed, match=r"v2 holds changes of .*v1: model\.safetensors is dam"):
        read(delta)


def test_another_version_in_its_place_is_noticed(delta: Path):
    shutil.copy(delta.parent / "whole" / "manifest.json", delta.parent / "v1" / "manifest.json")
    with pytest.raises(LoadFailed, match=r"v2 holds changes of .*v1 holds .*whole, not"):
        read(delta)


def test_that_it_is_gone_is_said(delta: Path):
    shutil.rmtree(delta.parent / "v1")
    with pytest.raises(LoadFailed, match=r"v2 holds changes of .*v1, which cannot be read: "):
        read(delta)


def test_a_patch_of_something_else_is_noticed_by_what_it_makes(delta: Path):
    """The patch is intact: its checksum is right."""
    patch = delta / "model.safetensors.patch"
    flip_a_bit(patch, at=0.9999)
    manifest = Manifest.model_validate_json((delta / "manifest.json").read_bytes())
    changed = manifest.model_copy(update={"patches": [checksum_file(patch)]})
    (delta / "manifest.json").write_text(changed.model_dump_json())
    with pytest.raises(LoadFailed, match=r"do not turn .*v1 into the published weights"):
        read(delta)
