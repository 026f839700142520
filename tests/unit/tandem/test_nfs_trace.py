"""The simulated disk agrees with file operations of two kernel clients on NFS (`make test-nfs`)."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import pytest

from tests.support.file_trace import Operation, Recorder, read_trace
from tests.support.trace_replay import Replay
from tests.support.unreliable_disk import UnreliableDisk

GOLDEN = Path(__file__).parents[2] / "golden" / "nfs-trace.jsonl.gz"


@pytest.fixture(scope="module")
def trace() -> list[Operation]:
    return read_trace(GOLDEN)


@pytest.fixture
def data(tmp_path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def named(trace: list[Operation], name: str) -> list[Operation]:
    return [each for each in trace if each.name == name]


def is_told(published: Operation) -> bool:
    """Return whether the trainer reported a version, instead of being killed."""
    return isinstance(published.outcome, dict) and bool(published.outcome)


def test_the_trace_has_two_clients_restarts_and_each_kind_of_call(trace):
    assert {each.client for each in trace} == {"trainer", "sampler", "server"}
    assert len(named(trace, "restart")) >= 3
    told = {each.path: each.outcome for each in named(trace, "call publish") if is_told(each)}
    loaded = {each.path: each.outcome for each in named(trace, "call load")}
    assert len(told) >= 30 and loaded == told
    assert len(named(trace, "call collect")) >= 30
    assert named(trace, "call peek") and not any(each.outcome for each in named(trace, "call peek"))


def test_the_simulated_disk_agrees_with_the_kernels_clients(trace, data):
    with UnreliableDisk(data) as disk:
        replayed = Replay(disk, data, trace).run()
    assert replayed.disagreed == []
    assert len(replayed.staler) + replayed.raced < replayed.agreed / 50
    stale = [each for each in named(trace, "open") if each.outcome == "ENOENT"]
    assert stale, "the trace has readers who look too early"


def test_a_simulated_client_that_is_too_fresh_disagrees(trace, data, monkeypatch):
    monkeypatch.setattr("tests.support.unreliable_disk.LOOKUP_SECONDS", 0.0)
    with UnreliableDisk(data) as disk:
        replayed = Replay(disk, data, trace).run()
    assert {each.outcome for each, _ in replayed.disagreed} == {"ENOENT"}


def test_a_false_outcome_in_the_trace_disagrees(trace, data):
    at = next(i for i, each in enumerate(trace) if each.name == "read")
    wrong = [*trace[:at], replace(trace[at], outcome="0123456789abcdef"), *trace[at + 1 :]]
    with UnreliableDisk(data) as disk:
        ((operation, _),) = Replay(disk, data, wrong).run().disagreed
    assert operation == wrong[at]


def test_reported_versions_are_whole_on_the_simulated_disk_after_each_power_failure(trace, data):
    restarts = named(trace, "restart")
    calls = {each.path: each for each in named(trace, "call publish") if is_told(each)}
    undisturbed = {
        path
        for path, call in calls.items()
        if all(call.ended < each.began or each.ended < call.began for each in restarts)
    }
    written = {each.path: each.more for each in named(trace, "close")}
    put_away = {each.path: each for each in named(trace, "rename") if ".trash/" in each.more}
    checked = set()

    def lose_power(restart: Operation) -> None:
        disk.lose_power()
        for path in undisturbed:
            run, _, leaf = path.rpartition("/")
            folder = f"weights/{run.replace(':', '_')}"
            gone = put_away.get(f"{folder}/{leaf}")
            if calls[path].ended > restart.ended or (gone and gone.began < restart.ended):
                continue
            files = {name: each for name, each in written.items() if f"/.partial-{leaf}/" in name}
            for name, digest in files.items():
                assert (data / folder / leaf / Path(name).name).read_text() == digest
            checked.add(path)

    with UnreliableDisk(data) as disk:
        Replay(disk, data, trace).run(at_restart=lose_power)
    assert checked


def test_a_recorder_notes_operations_below_its_folder_with_their_outcomes(data, tmp_path):
    noted: list[Operation] = []
    with Recorder(data, client="a", note=noted.append):
        (tmp_path / "elsewhere").write_text("x")
        (data / "new").mkdir()
        (data / "new" / "file").write_bytes(b"content")
        assert (data / "new" / "file").read_bytes() == b"content"
        assert not (data / "none").exists()
        (data / "new").rename(data / "old")
        assert [each.name for each in (data / "old").iterdir()] == ["file"]
    digest = blake2b(b"content", digest_size=8).hexdigest()
    assert [(each.name, each.path, each.more, each.outcome) for each in noted] == [
        ("make", "new", "", "ok"),
        ("create", "new/file", "", "ok"),
        ("write", "new/file", "", "ok"),
        ("close", "new/file", digest, "ok"),
        ("open", "new/file", "", "ok"),
        ("read", "new/file", "", digest),
        ("look", "none", "", "ENOENT"),
        ("rename", "new", "old", "ok"),
        ("list", "old", "", ["file"]),
    ]
    assert all(each.began <= each.ended and each.client == "a" for each in noted)
