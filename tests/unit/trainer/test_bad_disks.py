"""A trainer's files on NFS and on disks that fill up, fail and lose power."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from tandem.v1 import common_pb2, trainer_pb2
from tandem.weights import PartialVersion, open_version
from tandem.weights.store import make_folder, sync_at_once
from tests.support.local_trainer import SPEC, data_of, forward_backward, load, make
from tests.support.unreliable_disk import Fault, UnreliableDisk
from tests.support.waiting import PATIENCE
from tests.support.worker_process import RUN
from trainer_service.checkpoints import training_state
from trainer_service.service.operations import Operations

Write = Callable[[Operations, Path], str]
ADAMW = trainer_pb2.AdamWParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8)


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "data").mkdir()
    with UnreliableDisk(tmp_path / "data") as disk:
        yield disk


@pytest.fixture(scope="module")
def adapters(models) -> Operations:
    return make(models["qwen3"], SPEC)


@pytest.fixture(scope="module")
def whole(models) -> Operations:
    return make(models["qwen3"], None)


@pytest.fixture
def operations(request, adapters, whole) -> Operations:
    """A run with adapters, or one whose weights are handed over."""
    parameters = getattr(request.node, "callspec", SimpleNamespace(params={})).params
    return whole if parameters.get("write") is hand_over else adapters


def header(path: Path) -> common_pb2.OperationHeader:
    """A redelivery has the same header."""
    return common_pb2.OperationHeader(run_id=RUN, seq_id=1, operation_id=f"{RUN}:{path}")


def publish(operations: Operations, path: Path) -> str:
    """Return the failure's type, or an empty string."""
    version = common_pb2.WeightVersion(name=f"{RUN}/{path.name}", path=str(path), run_id=RUN)
    reply = operations.publish(trainer_pb2.PublishRequest(header=header(path), version=version))
    return told(reply)


def publish_early(operations: Operations, path: Path, *, handoff: bool = False) -> str:
    version = common_pb2.WeightVersion(name=f"{RUN}/{path.name}", path=str(path), run_id=RUN)
    request = trainer_pb2.PublishRequest(
        header=header(path), version=version, early=True, handoff=handoff
    )
    reply = operations.publish(request)
    if not reply.durable and not reply.HasField("failure"):
        reply = operations.publisher.await_published(request).result(timeout=60)
    assert reply.durable or reply.HasField("failure")
    return told(reply)


def hand_over(operations: Operations, path: Path) -> str:
    try:
        return publish_early(operations, path, handoff=True)
    finally:
        operations.publisher.release()


def save(operations: Operations, path: Path) -> str:
    request = trainer_pb2.SaveCheckpointRequest(header=header(path), path=str(path))
    return told(operations.save_checkpoint(request))


def snapshot(operations: Operations, path: Path) -> str:
    forward_backward(operations, data_of(1))
    request = trainer_pb2.OptimStepRequest(header=header(path), adamw=ADAMW, snapshot=str(path))
    assert not operations.optim_step(request).HasField("failure")
    return told(operations.snapshots.result(str(path)).result(timeout=60))


def told(reply) -> str:
    if not reply.HasField("failure"):
        return ""
    assert reply.failure.type == "internal_error" or "again" in reply.failure.message
    return reply.failure.type


def check(operations: Operations, path: Path) -> None:
    if (path / "manifest.json").exists():
        open_version(path, name=f"{RUN}/{path.name}")
    else:
        training_state.check(path, operations.trainer, optimizer=True)


writes = pytest.mark.parametrize("write", [publish, publish_early, hand_over, save, snapshot])


@writes
@pytest.mark.parametrize("fault", [Fault.FULL, Fault.LOST])
def test_what_the_disk_does_not_take_is_told_and_gone_and_can_be_written_again(
    operations, disk, tmp_path, write, fault
):
    failure = {Fault.FULL: "storage_full", Fault.LOST: "publish_failed"}[fault]
    for nth, strike in enumerate(disk.strikes(fault)):
        make_folder(run := tmp_path / "data" / str(nth) / "kind" / "run")
        with strike:
            outcome = write(operations, run / "one")
        assert outcome == (failure if strike.hit else ""), strike.hit
        assert [each.name for each in run.iterdir()] == ([] if strike.hit else ["one"]), strike.hit
        assert write(operations, run / "two") == ""
        disk.lose_power()
        for path in run.iterdir():
            check(operations, path)
        assert (run / "two").exists()


def test_what_cannot_be_computed_is_told_while_the_disk_still_stands_still(
    operations, tmp_path, monkeypatch
):
    class NotComputedError(Exception):
        pass

    def fail(_backend) -> None:
        raise NotComputedError

    moves, ended = Event(), Event()

    def sync_slowly(syncs: Iterable[Callable[[], None]]) -> None:
        moves.wait()
        sync_at_once(syncs)
        ended.set()

    monkeypatch.setattr("trainer_service.checkpoints.version_files.sync_at_once", sync_slowly)
    make_folder(run := tmp_path / "data" / "kind" / "run")
    with monkeypatch.context() as patch:
        patch.setattr("trainer_service.checkpoints.publish.compute_canary", fail)
        with pytest.raises(NotComputedError):
            publish(operations, run / "one")
    moves.set()
    assert ended.wait(PATIENCE)
    assert publish(operations, run / "one") == ""
    assert [each.name for each in run.iterdir()] == ["one"]


@pytest.mark.parametrize("write", [publish, publish_early, hand_over, save])
def test_a_trainer_killed_anywhere_is_followed_by_one_that_completes_what_it_wrote(
    operations, disk, tmp_path, write
):
    for nth, strike in enumerate(disk.strikes(Fault.KILL)):
        make_folder(run := tmp_path / "data" / str(nth) / "kind" / "run")
        with strike:
            write(operations, run / "one")
        if (run / "one").exists():
            check(operations, run / "one")
        assert write(operations, run / "one") == "", strike.hit
        disk.lose_power()
        assert [each.name for each in run.iterdir()] == ["one"], strike.hit
        check(operations, run / "one")


def test_a_machine_without_power_loses_no_early_version_for_good(operations, disk, tmp_path):
    for nth, strike in enumerate(disk.strikes(Fault.KILL)):
        make_folder(run := tmp_path / "data" / str(nth) / "kind" / "run")
        with strike:
            publish_early(operations, run / "one")
        disk.lose_power()
        assert publish_early(operations, run / "one") == "", strike.hit
        disk.lose_power()
        assert [each.name for each in run.iterdir()] == ["one"], strike.hit
        check(operations, run / "one")


def test_an_early_version_can_be_read_before_it_is_durable(operations, tmp_path, monkeypatch):
    go_on, make_durable = Event(), PartialVersion.make_durable

    def wait_first(version: PartialVersion, syncs: Iterable[Callable[[], None]]) -> None:
        go_on.wait()
        make_durable(version, syncs)

    make_folder(run := tmp_path / "data" / "kind" / "run")
    version = common_pb2.WeightVersion(name=f"{RUN}/one", path=str(run / "one"), run_id=RUN)
    early = trainer_pb2.PublishRequest(header=header(run), version=version, early=True)
    monkeypatch.setattr(PartialVersion, "make_durable", wait_first)
    assert not operations.publish(early).durable
    check(operations, run / "one")
    durable = operations.publisher.await_published(early)
    assert not durable.done()
    go_on.set()
    assert durable.result(timeout=60).durable


# --- Reading ---------------------------------------------------------------------------------


def test_a_checkpoint_is_loaded_by_a_host_that_looked_too_early_and_with_files_that_get_stale(
    operations, disk, tmp_path
):
    path = tmp_path / "data" / "kind" / "run" / "one"
    with disk.at("reader"):
        assert load(operations, path).failure.type == "checkpoint_damaged"
    assert save(operations, path) == ""
    with disk.at("reader"):
        assert not path.exists()
        training_state.check(path, operations.trainer, optimizer=True)
        assert not load(operations, path).HasField("failure")
    for strike in disk.strikes(Fault.STALE):
        with strike:
            check(operations, path)
