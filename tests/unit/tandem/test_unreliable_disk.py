"""The fake filesystem of other tests fails as NFS and disks do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tandem.weights.store import fsync_path
from tests.support.unreliable_disk import Fault, UnreliableDisk


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "data").mkdir()
    with UnreliableDisk(tmp_path / "data") as disk:
        yield disk


@pytest.fixture
def data(tmp_path) -> Path:
    return tmp_path / "data"


def write(path: Path, content: str, *, sync: bool = False) -> None:
    with path.open("w") as file:
        file.write(content)
        if sync:
            file.flush()
            fsync_path(path)


# --- As measured with a real NFS client ------------------------------------------------------


def test_a_host_that_has_looked_for_a_name_in_vain_does_not_see_it_for_30_seconds(disk, data):
    with disk.at("reader"):
        assert not (data / "a").exists()
    write(data / "a", "new")
    with disk.at("reader"):
        assert not (data / "a").exists()
        with pytest.raises(FileNotFoundError):
            (data / "a").read_text()
        disk.now += 30
        assert (data / "a").read_text() == "new"


def test_a_name_that_nobody_looked_for_is_seen_at_once_and_so_is_one_in_a_listed_folder(disk, data):
    with disk.at("reader"):
        assert not (data / "a").exists()
    write(data / "a", "new")
    write(data / "b", "new")
    with disk.at("reader"):
        assert (data / "b").read_text() == "new"
        assert sorted(path.name for path in data.iterdir()) == ["a", "b"]
        assert (data / "a").read_text() == "new"


def test_a_folder_listed_before_a_name_is_made_renews_the_belief_that_there_is_none(disk, data):
    with disk.at("reader"):
        assert not (data / "a").exists()
        disk.now += 20
        assert list(data.iterdir()) == []
    write(data / "a", "new")
    with disk.at("reader"):
        disk.now += 20
        assert not (data / "a").exists()
        disk.now += 10
        assert (data / "a").read_text() == "new"


def test_a_host_that_knows_a_replaced_file_or_a_renamed_folder_sees_the_old_for_30_seconds(
    disk, data
):
    write(data / "a", "old")
    (data / "old").mkdir()
    write(data / "old" / "file", "content")
    with disk.at("reader"):
        assert (data / "a").read_text() == "old"
        assert (data / "old" / "file").exists()
    write(data / "b", "new")
    (data / "b").replace(data / "a")
    (data / "old").rename(data / "new")
    assert (data / "a").read_text() == "new" and not (data / "old").exists()
    with disk.at("reader"):
        assert (data / "a").read_text() == "old"
        assert (data / "old" / "file").read_text() == "content"
        disk.now += 30
        assert (data / "a").read_text() == "new"
        assert not (data / "old").exists()


# --- Power failures --------------------------------------------------------------------------


def test_what_was_not_synced_does_not_survive_a_power_failure(disk, data):
    for name in ("whole", "zeros"):
        (data / name).mkdir()
        write(data / name / "file", "content", sync=name == "whole")
        fsync_path(data / name)
    write(data / "moved", "content", sync=True)
    fsync_path(data)
    (data / "moved").rename(data / "whole" / "moved")
    (data / "nameless").mkdir()
    disk.lose_power()
    found = {str(path.relative_to(data)) for path in data.rglob("*")}
    assert found == {"whole", "whole/file", "zeros", "zeros/file", "moved"}
    assert (data / "whole" / "file").read_text() == "content"
    assert (data / "zeros" / "file").read_bytes() == bytes(7)


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.FULL])
def test_what_a_failing_sync_or_close_lost_is_not_brought_back_by_the_next_sync(disk, data, fault):
    for strike in disk.strikes(fault):
        (data / "f").unlink(missing_ok=True)
        failed = False
        with strike:
            try:
                write(data / "f", "content", sync=True)
            except OSError:
                failed = True
        assert failed == bool(strike.hit)
        if strike.hit.startswith(("sync", "close")):
            fsync_path(data / "f")
        whole = (data / "f").exists() and (data / "f").read_text() == "content"
        # A failed close loses nothing that was synced before.
        assert whole == (strike.hit in ("", "close /f"))


def test_the_name_in_a_folder_whose_sync_failed_goes_with_the_power(disk, data):
    write(data / "f", "content", sync=True)
    with next(disk.strikes(Fault.LOST)), pytest.raises(OSError, match="Input/output"):
        fsync_path(data)
    fsync_path(data)
    disk.lose_power()
    assert list(data.iterdir()) == []


# --- Kills and stale files -------------------------------------------------------------------


def test_a_killed_process_does_nothing_more(disk, data):
    seen = []
    for strike in disk.strikes(Fault.KILL):
        shutil.rmtree(data / "d", ignore_errors=True)
        with strike:
            try:
                (data / "d").mkdir()
                write(data / "d" / "file", "content")
                (data / "d" / "file").rename(data / "d" / "named")
            finally:
                shutil.rmtree(data / "d", ignore_errors=True)
        seen.append(sorted(str(path.relative_to(data)) for path in data.rglob("*")))
    half = ["d", "d/file"]
    # Killed before mkdir, create, write, close, rename and the removals. The last run is not
    # killed.
    assert seen == [[], ["d"], half, half, half, ["d", "d/named"], ["d"], []]


def test_an_open_file_gets_stale_and_can_be_opened_again(disk, data):
    write(data / "f", "content")
    with next(disk.strikes(Fault.STALE)), (data / "f").open("rb") as file:
        for _ in range(2):
            with pytest.raises(OSError, match="Stale"):
                file.read()
        assert (data / "f").read_text() == "content"
