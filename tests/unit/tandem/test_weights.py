from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tandem.errors import LoadFailed
from tandem.weights import (
    Canary,
    Manifest,
    PartialVersion,
    checksum_file,
    new_version_name,
    open_version,
    version_path,
)
from tandem.weights.manifest import MANIFEST_NAME
from tandem.weights.store import in_threads

RUN = "s-ab12:train:0"
SHARDS = {
    "model-00001-of-00002.safetensors": b"\x00\x01" * 5000,
    "model-00002-of-00002.safetensors": b"",
}


def write(data_dir: Path, *, number: int = 1) -> tuple[PartialVersion, Manifest]:
    """Write a version without its commit."""
    name = new_version_name(run_id=RUN, number=number)
    partial = PartialVersion(version_path(data_dir, name))
    partial.create()
    for file, content in SHARDS.items():
        (partial.path / file).write_bytes(content)
    manifest = Manifest(
        version=name,
        run_id=RUN,
        step=number,
        dtype="float32",
        tensors=2,
        created="2025-01-01T00:00:00Z",
        files=[checksum_file(partial.path / file) for file in SHARDS],
        canary=Canary(tokens=[1, 2, 3], logprobs=[-0.1, -2.5]),
    )
    return partial, manifest


def publish(data_dir: Path, *, number: int = 1) -> tuple[Path, Manifest]:
    partial, manifest = write(data_dir, number=number)
    partial.commit(manifest)
    return partial.final, manifest


def test_a_published_version_is_read_back_as_it_was_written(tmp_path):
    path, manifest = publish(tmp_path)
    assert open_version(path, name=manifest.version) == manifest
    assert manifest.bytes == 10_000
    assert path.parent == tmp_path / "weights" / "s-ab12_train_0"
    assert {file.name for file in path.iterdir()} == {*SHARDS, MANIFEST_NAME}


def test_nothing_has_the_final_name_before_the_rename_and_everything_has_it_after(
    tmp_path, monkeypatch
):
    partial, manifest = write(tmp_path)
    seen = []
    rename = Path.rename

    def watched(self: Path, target: Path) -> Path:
        seen.append((partial.final.exists(), open_version(self, name=manifest.version)))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watched)
    assert not partial.final.exists()
    partial.commit(manifest)
    assert seen == [(False, manifest)]  # a version is whole before it gets its name
    assert open_version(partial.final) == manifest
    assert not partial.path.exists()


def test_a_commit_makes_the_manifest_durable_before_the_rename_and_the_name_after(
    tmp_path, monkeypatch
):
    partial, manifest = write(tmp_path)
    acts = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (acts.append("fsync"), fsync(fd)))
    monkeypatch.setattr(Path, "rename", lambda *args: (acts.append("rename"), rename(*args)))
    partial.commit(manifest)
    # The names of the version, of its run, and of the folder of all runs.
    assert acts == ["fsync", "fsync", "rename", "fsync", "fsync", "fsync"]


def test_a_commit_that_fails_publishes_nothing_and_is_discarded(tmp_path, monkeypatch):
    partial, manifest = write(tmp_path)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "fsync", full)
        partial.commit(manifest)
    assert not partial.final.exists()
    partial.discard()
    assert list(partial.path.parent.iterdir()) == []
    partial.discard()  # a second time, or by another rank: no error


def test_a_name_cannot_be_taken_twice(tmp_path):
    partial, manifest = write(tmp_path)
    with pytest.raises(FileExistsError):
        PartialVersion(partial.final).create()
    partial.commit(manifest)
    again = PartialVersion(partial.final)
    again.create()
    with pytest.raises(OSError, match=r"not empty|exists"):
        again.commit(manifest)
    assert open_version(partial.final) == manifest


def test_a_missing_file_is_found(tmp_path):
    path, _ = publish(tmp_path)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(LoadFailed, match="lacks model-00002"):
        open_version(path)


def test_what_is_missing_is_named_without_its_folder(tmp_path):
    partial, manifest = write(tmp_path)
    partial.commit(manifest)
    missing = partial.final / sorted(SHARDS)[0]
    missing.unlink()
    with pytest.raises(LoadFailed, match=missing.name) as lacking:
        open_version(partial.final)
    with pytest.raises(LoadFailed, match=MANIFEST_NAME) as unpublished:
        open_version(tmp_path / "v000009-00000000")
    for refused in (lacking, unpublished):
        assert str(tmp_path) not in str(refused.value)


def test_a_truncated_file_is_found_even_without_checksums(tmp_path):
    path, _ = publish(tmp_path)
    os.truncate(path / "model-00001-of-00002.safetensors", 9_999)
    with pytest.raises(LoadFailed, match="9999 bytes, not 10000"):
        open_version(path, checksums=False)


def test_one_flipped_bit_is_found(tmp_path):
    path, _ = publish(tmp_path)
    file = path / "model-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[7000] ^= 0x10
    file.write_bytes(content)
    with pytest.raises(LoadFailed, match="wrong checksum"):
        open_version(path)
    open_version(path, checksums=False)


def test_a_version_under_another_s_name_is_found(tmp_path):
    path, manifest = publish(tmp_path)
    other = new_version_name(run_id=RUN, number=1)
    with pytest.raises(LoadFailed, match=f"holds {manifest.version}, not {other}"):
        open_version(path, name=other)


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": 1}', b"\xff\xfe"])
def test_a_damaged_manifest_is_found(tmp_path, content):
    path, _ = publish(tmp_path)
    (path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(LoadFailed, match=r"manifest of .* is damaged"):
        open_version(path)


@pytest.mark.parametrize("kind", ["link", "pipe", "large"])
def test_a_manifest_that_somebody_put_in_its_place_is_not_read(tmp_path, kind):
    path, _ = publish(tmp_path)
    file = path / MANIFEST_NAME
    file.rename(tmp_path / "moved")
    if kind == "link":
        file.symlink_to(tmp_path / "moved")
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        with file.open("wb") as stream:
            stream.truncate(2**40)
    with pytest.raises(LoadFailed, match="not a published weight version"):
        open_version(path)


def test_a_version_in_the_making_cannot_be_opened(tmp_path):
    partial, _ = write(tmp_path)
    for path in (partial.path, partial.final):
        with pytest.raises(LoadFailed, match="not a published weight version"):
            open_version(path)


def test_names_never_repeat_and_sort_by_number():
    names = [new_version_name(run_id=RUN, number=7) for _ in range(100)]
    assert len(set(names)) == 100
    assert new_version_name(run_id=RUN, number=9) < new_version_name(run_id=RUN, number=10)
    assert names[0].startswith(f"{RUN}/v000007-")


def test_threads_work_on_items_in_their_order_and_begin_none_after_an_error():
    assert in_threads(lambda n: 10 * n, range(20), threads=3) == [10 * n for n in range(20)]
    assert in_threads(lambda n: threading.get_ident(), [1], threads=9) == [threading.get_ident()]
    begun, stopped = [], threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise LoadFailed("the first is damaged")
        stopped.wait(60)

    with pytest.raises(LoadFailed, match="first is damaged"):
        in_threads(work, range(20), threads=2)
    stopped.set()
    assert len(begun) <= 3
