"""Snapshots of trainers, and other data for restoring a run."""

from __future__ import annotations

from sqlalchemy import select

from gateway.storage.tables import operations
from tandem.errors import StorageFull
from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.gateway.fake_trainer import FakeTrainer, after, dies_at
from tests.support.gateway.running import forward_backward_bytes
from tests.support.gateway.runs import (
    OFTEN,
    SELDOM,
    Run,
    run_of,
    save,
    snapshots,
    train,
    undisturbed,
)
from tests.support.waiting import wait_until


def payloads(gate) -> list[int]:
    """Operations with a stored payload."""
    kept = select(operations.c.seq_id).where(operations.c.payload.is_not(None))
    return sorted(row["seq_id"] for row in gate.run(gate.gateway.database.read(kept)))


def test_a_snapshot_shortens_the_replay_and_frees_what_it_covers(start):
    with start(recovery=OFTEN) as gate:
        run = Run.new(gate)
        for number in (1, 2, 3):
            train(run, number)
            newest = wait_until(lambda: run_of(run).log.newest)
            wait_until(lambda n=number: run_of(run).log.newest.step == n)
            assert newest
        wait_until(lambda: [path.name[:8] for path in snapshots(gate)] == ["00000002", "00000003"])
        wait_until(lambda: payloads(gate) == [5])
        train(run, 4)
        wait_until(lambda: run_of(run).log.newest.step == 4)
        run.backward(9)
        run.outcome(9)
        run.die()
        run.step(10)
        run.outcome(10)
        assert run.newest.history == undisturbed(5)
        assert [seq for _, seq in run.newest.applied] == [9, 10]
        metrics = run.client.get("/metrics").text
        assert 'tandem_gateway_trainer_restorations_total{outcome="restored"} 1.0' in metrics
        assert 'tandem_gateway_snapshots_total{outcome="written"}' in metrics


def test_the_snapshot_before_is_used_when_the_newest_is_damaged(start):
    with start(recovery=OFTEN) as gate:
        run = Run.new(gate)
        for number in (1, 2, 3):
            train(run, number)
            wait_until(lambda n=number: run_of(run).log.newest.step == n)
        (snapshots(gate)[-1] / "checkpoint.json").write_text("{")
        run.die()
        train(run, 4)
        assert run.newest.history == undisturbed(4)
        assert [seq for _, seq in run.newest.applied] == [5, 6, 7, 8]
        assert [r.seq_id - 1 for r in run.newest.restored] == [6, 4, 6]


def test_a_run_whose_snapshots_are_all_damaged_ends_with_a_sentence(start, no_wait):
    with start(recovery=OFTEN) as gate:
        run = Run.new(gate)
        for number in (1, 2, 3):
            train(run, number)
            wait_until(lambda n=number: run_of(run).log.newest.step == n)
        for folder in snapshots(gate):
            (folder / "checkpoint.json").write_text("{")
        run.die()
        run.backward(7)
        refused = run.outcome(7).json()
        assert refused["type"] == "worker_died"
        assert "none of its snapshots can be read" in refused["error"]
        assert run.client.get("/api/tandem/v1/status").status_code == 200


def test_a_snapshot_that_cannot_be_written_is_shown_and_stops_nothing(start):
    class Full(FakeTrainer):
        def __init__(self, spec) -> None:
            super().__init__(spec)
            self.snapshot_error = StorageFull("the disk is full")

    with start(recovery=OFTEN, launcher=FakeLauncher(Full)) as gate:
        run = Run.new(gate)
        train(run, 1)
        (status,) = wait_until(
            lambda: [
                each
                for each in run.client.get("/api/tandem/v1/status").json()["runs"]
                if each["snapshot_problem"]
            ]
        )
        assert status["snapshot_problem"] == "the disk is full"
        run.die()
        train(run, 2)
        assert run.newest.history == undisturbed(2)


def test_snapshots_count_towards_the_owners_bytes(start):
    with start(recovery=OFTEN, limit={"checkpoint_bytes": 150}) as gate:
        run = Run.new(gate)
        train(run, 1)
        wait_until(lambda: run_of(run).log.newest.step == 1)
        train(run, 2)
        wait_until(lambda: "TANDEM_LIMIT_CHECKPOINT_BYTES" in run_of(run).snapshot_problem)
        assert len(snapshots(gate)) == 1
        body = {"model_id": run.id, "seq_id": 5, "path": "mine"}
        run.client.post("/api/v1/save_weights", json=body)
        assert run.outcome(5).json()["type"] == "limit_exceeded"


def test_what_a_client_saves_serves_as_a_snapshot(start):
    with start(recovery=SELDOM) as gate:
        run = Run.new(gate)
        train(run, 1)
        save(run, 3, "one")
        wait_until(lambda: run_of(run).log.newest.step == 1)
        run.backward(4)
        run.outcome(4)
        save(run, 5, "without-the-gradients")
        assert run_of(run).log.newest.step == 1
        run.step(6)
        run.outcome(6)
        save(run, 7, "two")
        wait_until(lambda: run_of(run).log.newest.step == 2)
        wait_until(lambda: payloads(gate) == [4])
        assert not gate.gateway.checkpoints.snapshot_bytes["local"], "it is counted once"
        for folder in snapshots(gate):
            assert all(file.stat().st_nlink == 2 for file in folder.iterdir())
        history = run.newest.history
        run.die()
        run.backward(8)
        run.outcome(8)
        assert run.newest.history == after(history, "forward_backward", 8)
        assert [kind for kind, _ in run.newest.applied] == ["forward_backward"]


def test_a_run_is_restored_from_a_save_that_its_owner_has_deleted(start):
    with start(recovery=SELDOM) as gate:
        run = Run.new(gate)
        train(run, 1)
        save(run, 3, "one")
        answer = run.client.delete(f"/api/v1/training_runs/{run.id}/checkpoints/weights/one")
        assert answer.status_code == 204
        gate.run(gate.gateway.collect(run.id))
        assert not list(gate.settings.data_dir.glob("checkpoints/*/one*")), "gone at once"
        run.die()
        run.backward(4)
        assert run.outcome(4).status_code == 200
        assert [kind for kind, _ in run.newest.applied] == ["forward_backward"]


def test_what_is_kept_of_a_run_counts_with_the_size_of_its_files(start):
    with start(recovery=SELDOM, launcher=FakeLauncher(dies_at(4))) as gate:
        run = Run.new(gate)
        train(run, 1)
        save(run, 3, "one")
        run.backward(4)
        assert "recovered-1" in run.outcome(4).json()["error"]
        listed = run.client.get(f"/api/v1/training_runs/{run.id}/checkpoints").json()
        sizes = {each["checkpoint_id"]: each["size_bytes"] for each in listed["checkpoints"]}
        (folder,) = gate.settings.data_dir.glob("checkpoints/*/recovered-1-*")
        files = [file for file in folder.iterdir() if file.name != "checkpoint.json"]
        assert sizes["weights/recovered-1"] == sum(file.stat().st_size for file in files)


def test_a_run_with_too_much_to_replay_is_not_restored_until_its_next_snapshot(start):
    with start(recovery={"log_bytes": 10} | OFTEN) as gate:
        run = Run.new(gate)
        run.backward(1)
        run.outcome(1)
        assert not run_of(run).log.complete
        (status,) = run.client.get("/api/tandem/v1/status").json()["runs"]
        assert "it cannot be restored" in status["snapshot_problem"]
        run.step(2)
        run.outcome(2)
        wait_until(lambda: run_of(run).log.complete)
        run.die()
        run.step(3)
        assert run.outcome(3).json()["metrics"]
        run.backward(4)
        run.outcome(4)
        run.die()
        run.step(5)
        assert "more than 10 bytes came since the last snapshot" in run.outcome(5).json()["error"]


def test_a_client_waits_for_a_snapshot_when_there_is_hardly_room_for_more_to_replay(start):
    with start(recovery={"log_bytes": 38_000} | SELDOM) as gate:
        run = Run.new(gate)

        def backward(seq_id: int):
            body = forward_backward_bytes(run.id, seq_id, tokens=2400)
            assert 9_000 < len(body) < 10_000
            return run.backward(seq_id, body)

        gate.run(run.trainer.snapshot_gate.clear)
        for seq_id in (1, 2):
            backward(seq_id)
            run.outcome(seq_id)
        run.step(3)
        run.outcome(3)
        backward(4)
        run.outcome(4)
        refused = backward(5)
        assert refused.status_code == 429
        assert "a snapshot is being written" in refused.json()["error"]
        assert refused.headers["Retry-After"]
        gate.run(run.trainer.snapshot_gate.set)
        wait_until(lambda: run_of(run).log.newest.step == 1)
        assert backward(5).status_code == 200
        run.outcome(5)
        assert run_of(run).log.complete
