"""The segments of a run's record, on good and bad disks."""

from __future__ import annotations

import pytest

from gateway.runs.record.files import (
    Place,
    SegmentWriter,
    list_segments,
    place_in,
    read_lines,
    record_folder,
)
from tests.support.unreliable_disk import Fault, UnreliableDisk

RUN = "s-1:train:0"


BEGINNING = Place()


def lines(folder, start=BEGINNING, *, most_bytes=2**40):
    return [
        line.decode().strip()
        for piece, _ in read_lines(folder, "metrics", start, most_bytes=most_bytes)
        for line in piece
    ]


def writer(folder, epoch=5):
    return SegmentWriter(folder, "metrics", epoch)


def test_lines_are_read_in_the_order_of_writing_over_gateways(tmp_path):
    folder = record_folder(tmp_path, RUN)
    first, second = writer(folder, 9), writer(folder, 10)
    assert first.append(b"a\n") == Place(9, 0, 0)
    assert first.append(b"b\n") == Place(9, 0, 2)
    assert second.append(b"c\n") == Place(10, 0, 0)
    assert lines(folder) == ["a", "b", "c"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "metrics-10-0.jsonl",
        "metrics-9-0.jsonl",
    ]


def test_a_reader_goes_on_where_it_was(tmp_path):
    first = writer(tmp_path)
    first.append(b"a\n")
    *_, (_, end) = read_lines(tmp_path, "metrics", Place(), most_bytes=2**40)
    assert lines(tmp_path, end) == []
    first.append(b"b\n")
    writer(tmp_path, 6).append(b"c\n")
    assert lines(tmp_path, end) == ["b", "c"]


def test_an_offset_behind_a_segment_means_its_end(tmp_path):
    journal = writer(tmp_path)
    journal.append(b"a\n")
    far = Place(5, 0, 10**18 - 1)
    [(found, end)] = read_lines(tmp_path, "metrics", far, most_bytes=2**40)
    assert (found, end) == ([], Place(5, 0, 2))
    journal.append(b"b\n")
    assert lines(tmp_path, end) == ["b"]


def test_a_torn_last_line_is_ignored_until_it_is_whole(tmp_path):
    writer(tmp_path).append(b"a\n")
    with (tmp_path / "metrics-5-0.jsonl").open("ab") as file:
        file.write(b"tor")
        file.flush()
        assert lines(tmp_path) == ["a"]
        file.write(b"n\n")
    assert lines(tmp_path) == ["a", "torn"]


def test_lines_after_a_torn_one_of_an_earlier_gateway_are_read(tmp_path):
    writer(tmp_path).append(b"a\n")
    with (tmp_path / "metrics-5-0.jsonl").open("ab") as file:
        file.write(b"torn")
    writer(tmp_path, 6).append(b"b\n")
    assert lines(tmp_path) == ["a", "b"]


def test_a_lower_epoch_after_the_machines_restart_comes_last_all_the_same(tmp_path):
    writer(tmp_path, 900).append(b"a\n")
    writer(tmp_path, 3).append(b"b\n")
    assert list_segments(tmp_path, "metrics") == [Place(900, 0), Place(900, 1)]
    assert lines(tmp_path) == ["a", "b"]


def test_a_gateway_of_the_same_epoch_writes_no_file_of_another(tmp_path):
    writer(tmp_path).append(b"a\n")
    writer(tmp_path).append(b"b\n")
    assert lines(tmp_path) == ["a", "b"] and len(list(tmp_path.iterdir())) == 2


def test_a_full_segment_is_followed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.runs.record.files._SEGMENT_BYTES", 4)
    one = writer(tmp_path)
    for line in (b"a\n", b"b\n", b"c\n"):
        one.append(line)
    assert len(list_segments(tmp_path, "metrics")) == 2 and lines(tmp_path) == ["a", "b", "c"]


def test_other_files_are_no_segments(tmp_path):
    for name in ("run.json", "metrics-1.jsonl", "metrics-x-1.jsonl", "rollouts-1-1.jsonl"):
        (tmp_path / name).write_text("x\n")
    assert list_segments(tmp_path, "metrics") == []
    assert list_segments(tmp_path / "none", "metrics") == []
    assert place_in("rollouts-7-2.jsonl", 5) == Place(7, 2, 5)


def test_reading_stops_after_the_wanted_bytes(tmp_path):
    one = writer(tmp_path)
    for _ in range(3):
        one.append(b"x" * 2**20 + b"\n")
    assert len(lines(tmp_path, most_bytes=2**20)) < 3


@pytest.mark.parametrize("fault", [Fault.FULL, Fault.LOST, Fault.KILL])
def test_an_acknowledged_line_survives_every_fault_and_a_power_failure(tmp_path, fault):
    root = tmp_path / "data"
    root.mkdir()
    with UnreliableDisk(root) as disk:
        for number, strike in enumerate(disk.strikes(fault)):
            folder = record_folder(root, f"s-{number}:train:0")
            acknowledged = []
            with strike:
                one = writer(folder, 1)
                for name in ("a", "b", "c"):
                    for _ in range(3):  # a client sends again
                        try:
                            one.append(f"{name}\n".encode())
                        except OSError:
                            continue
                        acknowledged.append(name)
                        break
            writer(folder, 2).append(b"next\n")
            acknowledged.append("next")
            disk.lose_power()
            found = lines(folder)
            assert [name for name in acknowledged if name not in found] == []
            assert list(dict.fromkeys(found)) == sorted(dict.fromkeys(found), key="abcnext".find)


def test_a_full_disk_keeps_no_files_of_failed_appends(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    with UnreliableDisk(root) as disk:
        one = writer(root)
        for _ in range(5):
            with disk.strike_at(Fault.FULL, 2), pytest.raises(OSError, match="No space"):
                one.append(b"a\n")
        assert list(root.iterdir()) == []
        one.append(b"a\n")
        assert lines(root) == ["a"]
