"""Weight versions on NFS, and on disks that fill up, fail and lose power."""

from __future__ import annotations

import errno
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import LoadFailed
from tandem.weights import (
    Manifest,
    PartialVersion,
    checksum_file,
    new_version_name,
    open_version,
    version_path,
)
from tandem.weights.store import make_folder, read_again, sync_name, write_synced
from tests.support.unreliable_disk import Fault, UnreliableDisk
from tests.support.waiting import wait_until

RUN = "s-ab12:train:0"
SHARDS = {"a.safetensors": b"\x00\x01" * 10_000, "b.safetensors": b"some"}


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "data").mkdir()
    with UnreliableDisk(tmp_path / "data") as disk:
        yield disk


@pytest.fixture
def data(tmp_path) -> Path:
    return tmp_path / "data"


def write(partial: PartialVersion, name: str) -> Manifest:
    partial.create()
    for file, content in SHARDS.items():
        write_synced(partial.path / file, content)
    return Manifest(
        version=name,
        run_id=RUN,
        step=1,
        dtype="float32",
        tensors=2,
        created="2025-01-01T00:00:00Z",
        files=[checksum_file(partial.path / file) for file in SHARDS],
    )


def publish(data_dir: Path, *, name: str = "") -> str:
    """Return the published version's name, or an empty string if the disk fails."""
    name = name or new_version_name(run_id=RUN, number=1)
    partial = PartialVersion(version_path(data_dir, name))
    try:
        partial.commit(write(partial, name))
    except OSError:
        partial.discard()
        return ""
    return name


def names_on_disk(data_dir: Path) -> set[str]:
    found = {f"{RUN}/{path.name}" for path in data_dir.glob("weights/*/v*")}
    for name in found:
        open_version(version_path(data_dir, name), name=name)
    return found


# --- Writing ---------------------------------------------------------------------------------


def test_an_early_version_that_cannot_be_synced_is_damaged_before_the_other_syncs_end(data):
    name = new_version_name(run_id=RUN, number=1)
    partial = PartialVersion(version_path(data, name))
    partial.commit_early(write(partial, name))
    open_version(partial.final, name=name)

    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error")

    def wait() -> None:
        wait_until(lambda: not (partial.final / "manifest.json").exists())

    with pytest.raises(OSError, match="Input/output error"):
        partial.make_durable([wait, fail])
    assert not partial.final.exists()


@pytest.mark.parametrize("fault", [Fault.FULL, Fault.LOST])
def test_a_version_whose_disk_fails_leaves_nothing_and_the_next_one_is_kept(disk, data, fault):
    for strike in disk.strikes(fault):
        make_folder(data_dir := data / str(strike.countdown))
        with strike:
            told = publish(data_dir)
        assert bool(told) != bool(strike.hit), strike.hit
        assert names_on_disk(data_dir) == ({told} if told else set()), strike.hit
        assert told or list(data_dir.glob("weights/*/*")) == [], strike.hit
        again = publish(data_dir)
        disk.lose_power()
        assert again in names_on_disk(data_dir), strike.hit


def test_a_writer_killed_anywhere_leaves_a_whole_version_or_none(disk, data):
    for strike in disk.strikes(Fault.KILL):
        make_folder(data_dir := data / str(strike.countdown))
        with strike:
            publish(data_dir)
        found = names_on_disk(data_dir)
        for name in found:  # the next trainer finds it, and reports it as published
            sync_name(version_path(data_dir, name))
        again = publish(data_dir)
        disk.lose_power()
        assert names_on_disk(data_dir) == {*found, again}, strike.hit


@pytest.mark.parametrize("fault", [Fault.FULL, Fault.LOST])
def test_a_folder_whose_name_could_not_be_synced_is_not_left(disk, data, fault):
    for strike in disk.strikes(fault):
        folder = data / str(strike.countdown) / "b" / "c"
        try:
            with strike:
                make_folder(folder)
        except OSError:
            assert list(data.iterdir()) == [], strike.hit
            make_folder(folder)
        disk.lose_power()
        assert folder.is_dir(), strike.hit
        for each in (folder, *folder.parents[:2]):
            each.rmdir()


events = st.one_of(
    st.tuples(st.sampled_from([Fault.FULL, Fault.LOST, Fault.KILL]), st.integers(1, 30)),
    st.sampled_from(["publish", "lose power", "a minute passes", "readers look"]),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(events, max_size=12))
def test_whatever_happens_a_version_that_was_told_is_whole_for_all_readers(story):
    with TemporaryDirectory() as folder, UnreliableDisk(data := Path(folder)) as disk:
        told: set[str] = set()
        for event in story:
            name = new_version_name(run_id=RUN, number=1)
            if event == "lose power":
                disk.lose_power()
            elif event == "a minute passes":
                disk.now += 60
            elif event == "readers look":
                with disk.at("reader"):
                    assert not version_path(data, name).exists()
                told.add(publish(data, name=name))
            elif event == "publish":
                told.add(publish(data))
            else:
                fault, nth = event
                strike = disk.strike_at(fault, nth)
                done = ""
                with strike:
                    done = publish(data)
                told |= {done} - {""}
            assert "" not in told
            assert told <= names_on_disk(data)
            with disk.at("reader"):
                for name in told:
                    open_version(version_path(data, name), name=name)


# --- Reading ---------------------------------------------------------------------------------


def test_a_reader_that_looked_too_early_finds_the_version_when_it_is_told_its_name(disk, data):
    name = new_version_name(run_id=RUN, number=1)
    path = version_path(data, name)
    with disk.at("reader"), pytest.raises(LoadFailed, match="not a published weight version"):
        open_version(path)
    publish(data, name=name)
    with disk.at("reader"):
        assert not path.exists()
        assert open_version(path, name=name).version == name


def test_a_reader_whose_open_files_get_stale_opens_them_again(disk, data):
    name = publish(data)
    for strike in disk.strikes(Fault.STALE):
        with strike:
            assert open_version(version_path(data, name), name=name).version == name


def test_what_is_read_again_is_read_once_more_and_no_longer(tmp_path):
    reads = []

    def read(file: Path) -> bytes:
        reads.append(file)
        return file.read_bytes()

    with pytest.raises(FileNotFoundError):
        read_again(read, tmp_path / "none")
    assert len(reads) == 2


def test_a_version_keeps_its_content_while_it_is_read_although_it_is_put_away(disk, data):
    name = publish(data)
    path = version_path(data, name)
    with disk.at("reader"):
        open_version(path)
    path.rename(data / "trash")
    with disk.at("reader"):
        open_version(path)
        disk.now += 30
        with pytest.raises(LoadFailed):
            open_version(path)
