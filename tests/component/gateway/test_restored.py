"""Trainers that die and are restored, under a gateway whose workers are fakes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import MappingProxyType

import pytest
import tinker
from sqlalchemy import func, select

from gateway.storage.tables import operations, usage
from gateway.workers.backoff import Backoff
from tandem.errors import GradientsNotFinite, StorageFull
from tandem.v1 import trainer_pb2
from tests.support.files import tree
from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.gateway.fake_trainer import FakeTrainer, after
from tests.support.gateway.requests import finish
from tests.support.gateway.running import forward_backward_bytes, running_gateway
from tests.support.gateway.runs import Run
from tests.support.sdk import supervised
from tests.support.waiting import until, wait_until

OFTEN = {"share": 1.0, "replay": 0.0}
SELDOM = {"replay": 1e6, "share": 1e-9}


@pytest.fixture
def start(tmp_path):
    def with_(**changes):
        return running_gateway(tmp_path, session_ttl=600, sequence_gap_timeout=20, **changes)

    return with_


@pytest.fixture
def new_run():
    def make(gate) -> Run:
        session = gate.session_id()
        run_id = gate.run_id(session)
        worker_id, trainer = gate.worker(f"trainer-{session}")
        return Run(gate, run_id, worker_id, trainer, gate.http())

    return make


def train(run: Run, *numbers: int) -> list[dict]:
    """Steps of two operations each: a batch 2n-1 and a step 2n. Returns their outcomes."""
    for number in numbers:
        assert run.backward(2 * number - 1).status_code == 200
        run.outcome(2 * number - 1)
        assert run.step(2 * number).status_code == 200
    return [run.outcome(2 * number).json() for number in numbers]


def undisturbed(steps: int) -> str:
    """What a trainer knows after so many steps of `train`."""
    history = ""
    for seq_id in range(1, 2 * steps + 1):
        history = after(history, "forward_backward" if seq_id % 2 else "optim_step", seq_id)
    return history


def snapshots(gate) -> list[Path]:
    return sorted((gate.settings.data_dir / "snapshots").glob("*/*"))


def payloads(gate) -> list[int]:
    """The operations whose payload is still kept."""
    kept = select(operations.c.seq_id).where(operations.c.payload.is_not(None))
    return sorted(row["seq_id"] for row in gate.run(gate.gateway.database.read(kept)))


async def die(trainer: FakeTrainer, reason: str) -> None:
    """Let a trainer die in the middle of a call."""
    assert trainer.launcher is not None
    killing = asyncio.create_task(trainer.launcher.kill(trainer.spec.worker_id, reason))
    await asyncio.shield(killing)


def dies_at(seq_id: int) -> type[FakeTrainer]:
    """A trainer that dies whenever it is at this batch."""

    class Fragile(FakeTrainer):
        async def ForwardBackward(self, request, context):
            if request.header.seq_id - 1 == seq_id:
                await die(self, "it ran out of memory")
            return await super().ForwardBackward(request, context)

    return Fragile


def run_of(run: Run):
    return run.gate.gateway.runs.get(run.id)


def test_a_client_of_a_trainer_that_dies_only_waits(start):
    with start(recovery=SELDOM) as gate, gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        training.forward_backward([supervised([1, 9])], "cross_entropy").result()
        worker_id, trainer = gate.worker("trainer")
        gate.run(trainer.gate.clear)
        futures = [
            training.forward_backward([supervised([1, 9])], "cross_entropy") for _ in range(6)
        ]
        run = gate.gateway.runs.get(training.model_id)
        wait_until(lambda: run.dispatcher.queued == 6)
        gate.run(gate.launcher.kill(worker_id, "rank 1 was killed by SIGKILL"))
        assert all(future.result().metrics for future in futures)
        restored = gate.worker("trainer")[1]
        assert restored is not trainer
        assert [seq for _, seq in restored.applied] == [1, 2, 3, 4, 5, 6, 7]


def test_what_was_applied_is_replayed_in_order_and_recorded_once(start, new_run):
    with start(recovery=SELDOM) as gate:
        run = new_run(gate)
        train(run, 1, 2)
        run.backward(5)
        run.outcome(5)
        run.die()
        assert run.step(6).status_code == 200
        assert run.outcome(6).json()["metrics"] == {"grad_norm": 1.5}
        assert run.newest.history == undisturbed(3)
        history = run.client.get(f"/api/tandem/v1/runs/{run.id}/steps").json()["steps"]
        assert [row["step"] for row in history] == [1, 2, 3]
        gate.run(gate.gateway.usage.write)
        gate.run(gate.gateway.database.flush())
        counted = select(usage.c.event, func.sum(usage.c.count)).group_by(usage.c.event)
        rows = gate.run(gate.gateway.database.read(counted))
        assert {tuple(row.values()) for row in rows} == {("forward_backward", 3), ("optim_step", 3)}


def test_a_snapshot_shortens_the_replay_and_frees_what_it_covers(start, new_run):
    with start(recovery=OFTEN) as gate:
        run = new_run(gate)
        for number in (1, 2, 3):
            train(run, number)
            newest = wait_until(lambda: run_of(run).trainer.log.newest)
            wait_until(lambda n=number: run_of(run).trainer.log.newest.step == n)
            assert newest
        wait_until(lambda: [path.name[:8] for path in snapshots(gate)] == ["00000002", "00000003"])
        wait_until(lambda: payloads(gate) == [5])
        train(run, 4)
        wait_until(lambda: run_of(run).trainer.log.newest.step == 4)
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


def test_the_snapshot_before_is_used_when_the_newest_is_damaged(start, new_run):
    with start(recovery=OFTEN) as gate:
        run = new_run(gate)
        for number in (1, 2, 3):
            train(run, number)
            wait_until(lambda n=number: run_of(run).trainer.log.newest.step == n)
        (snapshots(gate)[-1] / "checkpoint.json").write_text("{")
        run.die()
        train(run, 4)
        assert run.newest.history == undisturbed(4)
        assert [seq for _, seq in run.newest.applied] == [5, 6, 7, 8]
        assert [r.seq_id - 1 for r in run.newest.restored] == [6, 4, 6]


def test_a_run_whose_snapshots_are_all_damaged_ends_with_a_sentence(start, new_run, no_wait):
    with start(recovery=OFTEN) as gate:
        run = new_run(gate)
        for number in (1, 2, 3):
            train(run, number)
            wait_until(lambda n=number: run_of(run).trainer.log.newest.step == n)
        for folder in snapshots(gate):
            (folder / "checkpoint.json").write_text("{")
        run.die()
        run.backward(7)
        refused = run.outcome(7).json()
        assert refused["type"] == "worker_died"
        assert "none of its snapshots can be read" in refused["error"]
        assert run.client.get("/api/tandem/v1/status").status_code == 200


def test_a_client_is_told_what_is_restored(start, new_run):
    released = threading.Event()

    class Held(FakeTrainer):
        """Comes up, and restores nothing until it is released."""

        async def Restore(self, request, context):
            await until(released.is_set)
            return await super().Restore(request, context)

    with start(recovery=SELDOM, launcher=FakeLauncher(Held)) as gate:
        run = new_run(gate)
        train(run, 1)
        gate.run(gate.launcher.start_gate.clear)
        run.die()
        run.step(3)

        def reason() -> str:
            answer = run.client.post(
                "/api/v1/retrieve_future", json={"request_id": f"{run.id}:3"}
            ).json()
            return str(answer)

        wait_until(lambda: "it was killed by SIGKILL; it is started again" in reason())
        (status,) = run.client.get("/api/tandem/v1/status").json()["runs"]
        assert "it is started again" in status["reason"]
        gate.launcher.waits_for = "its pod is not scheduled: 2 Insufficient memory"
        wait_until(lambda: "the trainer is starting: its pod is not scheduled" in reason())
        released.set()
        gate.run(gate.launcher.start_gate.set)
        run.outcome(3)


def test_an_operation_that_kills_its_trainer_three_times_ends_the_run(start, new_run):
    launcher = FakeLauncher(dies_at(5))
    with start(recovery=OFTEN, launcher=launcher) as gate:
        run = new_run(gate)
        for number in (1, 2):
            train(run, number)
            wait_until(lambda n=number: run_of(run).trainer.log.newest.step == n)
        run.backward(5)
        refused = run.outcome(5).json()
        assert refused["type"] == "worker_died"
        assert "died 3 times at operation 5, a forward_backward" in refused["error"]
        assert "it ran out of memory" in refused["error"]
        path = f"tinker://{run.id}/weights/recovered-2"
        assert f"from {path}" in refused["error"]
        listed = run.client.get(f"/api/v1/training_runs/{run.id}/checkpoints").json()
        assert [each["tinker_path"] for each in listed["checkpoints"]] == [path]
        assert len([spec for spec in launcher.specs if spec.kind == "trainer"]) == 3
        wait_until(lambda: not snapshots(gate))


@pytest.mark.usefixtures("no_wait")
def test_an_operation_that_runs_out_of_memory_is_computed_in_smaller_parts_and_so_replayed(
    start, new_run
):
    class Small(FakeTrainer):
        memory = MappingProxyType({3: 600})

    launcher = FakeLauncher(Small)
    with start(recovery=SELDOM, launcher=launcher) as gate:
        run = new_run(gate)
        train(run, 1, 2)
        assert len([spec for spec in launcher.specs if spec.kind == "trainer"]) == 3
        assert run.newest.history == undisturbed(2)

        def restored() -> tuple[int, int]:
            (status,) = run.client.get("/api/tandem/v1/status").json()["runs"]
            return status["restored"], status["micro_batch_tokens"]

        assert restored() == (2, 512)
        run.die()
        wait_until(lambda: restored() == (3, 512))
        train(run, 3)
        assert run.newest.history == undisturbed(3)
        batches = [
            request
            for request in run.newest.requests
            if isinstance(request, trainer_pb2.ForwardBackwardRequest)
        ]
        assert [request.micro_batch_tokens for request in batches] == [2048, 512, 0]


@pytest.mark.usefixtures("no_wait")
def test_an_operation_that_needs_too_much_memory_is_refused_again_when_it_is_replayed(
    start, new_run
):
    class Small(FakeTrainer):
        memory = MappingProxyType({1: 0})

    launcher = FakeLauncher(Small)
    with start(recovery=SELDOM, launcher=launcher) as gate:
        run = new_run(gate)
        run.backward(1)
        refused = run.outcome(1).json()
        assert (refused["type"], refused["error"]) == (
            "out_of_memory",
            "out_of_memory: one sequence is too long",
        )
        run.backward(2)
        assert run.outcome(2).status_code == 200
        run.die()
        run.backward(3)
        assert run.outcome(3).status_code == 200
        assert [seq for _, seq in run.newest.applied] == [1, 2, 3]
        assert len(launcher.servicers) == 5, "at 2048, 1024 and 512 tokens; refused; killed"


@pytest.mark.usefixtures("no_wait")
def test_a_replay_that_runs_out_of_memory_goes_on_in_smaller_parts(start, new_run):
    class Shrinking(FakeTrainer):
        """The first one has more memory than those after it."""

        def __init__(self, spec) -> None:
            super().__init__(spec)
            self.memory = {1: 1500} if launcher.servicers else {}

    launcher = FakeLauncher(Shrinking)
    with start(recovery=SELDOM, launcher=launcher) as gate:
        run = new_run(gate)
        for number, trainers in ((1, 1), (2, 3), (3, 4)):
            train(run, number)
            assert len(launcher.servicers) == trainers
            assert run.newest.history == undisturbed(number)
            run.die()


@pytest.mark.usefixtures("no_wait")
def test_a_trainer_that_never_tries_smaller_micro_batches_ends_the_run(start, new_run):
    class Stubborn(FakeTrainer):
        memory = MappingProxyType({1: 0})

        async def ForwardBackward(self, request, context):
            request.out_of_memory_at = 0
            return await super().ForwardBackward(request, context)

    with start(recovery=SELDOM, launcher=FakeLauncher(Stubborn)) as gate:
        run = new_run(gate)
        run.backward(1)
        refused = run.outcome(1).json()
        assert refused["type"] == "worker_died"
        assert "died 3 times at operation 1" in refused["error"]
        assert "rank 1 ran out of memory" in refused["error"]


def test_a_trainer_that_dies_at_different_operations_is_restored_again_and_again(start, new_run):
    with start(recovery=SELDOM) as gate:
        run = new_run(gate)
        for number in (1, 2, 3, 4):
            train(run, number)
            run.die()
        train(run, 5)
        assert run.newest.history == undisturbed(5)


def test_a_trainer_that_dies_while_it_is_restored_is_restored_again(start, new_run):
    class DiesOnce(FakeTrainer):
        async def OptimStep(self, request, context):
            if len(made) == 1 and request.header.seq_id - 1 == 4:
                made.append(self)
                await die(self, "it was killed by SIGKILL")
            return await super().OptimStep(request, context)

    made: list[FakeTrainer] = []
    launcher = FakeLauncher(DiesOnce)
    with start(recovery=SELDOM, launcher=launcher) as gate:
        run = new_run(gate)
        train(run, 1, 2, 3)
        made.append(run.newest)
        run.die()
        train(run, 4)
        assert len(made) == 2
        assert run.newest.history == undisturbed(4)


def test_a_trainer_that_does_not_start_again_ends_the_run_with_its_reason(start, new_run, no_wait):
    with start(recovery=SELDOM) as gate:
        run = new_run(gate)
        train(run, 1)
        gate.launcher.start_error["trainer"] = "the GPU is gone"
        run.die()
        run.backward(3)
        refused = run.outcome(3).json()
        assert refused["type"] == "worker_start_failed"
        assert "the GPU is gone; create the run again" in refused["error"]


@pytest.fixture
def no_wait(monkeypatch):
    """Trainers that cannot be started are tried again at once."""
    monkeypatch.setattr("gateway.workers.backoff.Backoff.failed", lambda _: 0.0)


def test_a_trainer_that_has_worked_does_not_wait_longer_than_the_one_before(
    start, new_run, monkeypatch
):
    waits = []
    failed = Backoff.failed

    def noted(backoff: Backoff) -> float:
        waits.append(failed(backoff))
        return 0.0

    monkeypatch.setattr(Backoff, "failed", noted)
    with start(recovery=SELDOM) as gate:
        run = new_run(gate)
        for number in (1, 2, 3):
            train(run, number)
            run.die()
        train(run, 4)
        assert run.newest.history == undisturbed(4)
    assert len(waits) == 3
    assert max(waits) <= 0.5


def test_a_snapshot_that_cannot_be_written_is_shown_and_stops_nothing(start, new_run):
    class Full(FakeTrainer):
        def __init__(self, spec) -> None:
            super().__init__(spec)
            self.snapshot_error = StorageFull("the disk is full")

    with start(recovery=OFTEN, launcher=FakeLauncher(Full)) as gate:
        run = new_run(gate)
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


def test_snapshots_count_towards_the_owners_bytes(start, new_run):
    with start(recovery=OFTEN, limit={"checkpoint_bytes": 150}) as gate:
        run = new_run(gate)
        train(run, 1)
        wait_until(lambda: run_of(run).trainer.log.newest.step == 1)
        train(run, 2)
        wait_until(lambda: "TANDEM_LIMIT_CHECKPOINT_BYTES" in run_of(run).trainer.taker.problem)
        assert len(snapshots(gate)) == 1
        body = {"model_id": run.id, "seq_id": 5, "path": "mine"}
        run.client.post("/api/v1/save_weights", json=body)
        assert run.outcome(5).json()["type"] == "limit_exceeded"


def save(run: Run, seq_id: int, name: str) -> str:
    body = {"model_id": run.id, "seq_id": seq_id, "path": name}
    assert run.client.post("/api/v1/save_weights", json=body).status_code == 200
    return run.outcome(seq_id).json()["path"]


def test_what_a_client_saves_serves_as_a_snapshot(start, new_run):
    with start(recovery=SELDOM) as gate:
        run = new_run(gate)
        train(run, 1)
        save(run, 3, "one")
        wait_until(lambda: run_of(run).trainer.log.newest.step == 1)
        run.backward(4)
        run.outcome(4)
        save(run, 5, "without-the-gradients")
        assert run_of(run).trainer.log.newest.step == 1
        run.step(6)
        run.outcome(6)
        save(run, 7, "two")
        wait_until(lambda: run_of(run).trainer.log.newest.step == 2)
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


def test_a_run_is_restored_from_a_save_that_its_owner_has_deleted(start, new_run):
    with start(recovery=SELDOM) as gate:
        run = new_run(gate)
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


def test_what_is_kept_of_a_run_counts_with_the_size_of_its_files(start, new_run):
    with start(recovery=SELDOM, launcher=FakeLauncher(dies_at(4))) as gate:
        run = new_run(gate)
        train(run, 1)
        save(run, 3, "one")
        run.backward(4)
        assert "recovered-1" in run.outcome(4).json()["error"]
        listed = run.client.get(f"/api/v1/training_runs/{run.id}/checkpoints").json()
        sizes = {each["checkpoint_id"]: each["size_bytes"] for each in listed["checkpoints"]}
        (folder,) = gate.settings.data_dir.glob("checkpoints/*/recovered-1-*")
        files = [file for file in folder.iterdir() if file.name != "tandem.json"]
        assert sizes["weights/recovered-1"] == sum(file.stat().st_size for file in files)


def test_a_run_with_too_much_to_replay_is_not_restored_until_its_next_snapshot(start, new_run):
    with start(recovery={"log_bytes": 10} | OFTEN) as gate:
        run = new_run(gate)
        run.backward(1)
        run.outcome(1)
        assert not run_of(run).trainer.log.complete
        (status,) = run.client.get("/api/tandem/v1/status").json()["runs"]
        assert "it cannot be restored" in status["snapshot_problem"]
        run.step(2)
        run.outcome(2)
        wait_until(lambda: run_of(run).trainer.log.complete)
        run.die()
        run.step(3)
        assert run.outcome(3).json()["metrics"]
        run.backward(4)
        run.outcome(4)
        run.die()
        run.step(5)
        assert "TANDEM_RECOVERY_LOG_BYTES" in run.outcome(5).json()["error"]


def test_a_client_waits_for_a_snapshot_when_there_is_hardly_room_for_more_to_replay(start, new_run):
    with start(recovery={"log_bytes": 38_000} | SELDOM) as gate:
        run = new_run(gate)

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
        wait_until(lambda: run_of(run).trainer.log.newest.step == 1)
        assert backward(5).status_code == 200
        run.outcome(5)
        assert run_of(run).trainer.log.complete


def test_a_load_is_replayed_even_if_its_owner_deleted_the_checkpoint_since(start, new_run):
    with start(recovery=SELDOM) as gate:
        run = new_run(gate)
        train(run, 1)
        path = save(run, 3, "one")
        run.client.post(
            "/api/v1/load_weights", json={"model_id": run.id, "seq_id": 4, "path": path}
        )
        run.outcome(4)
        answer = run.client.delete(f"/api/v1/training_runs/{run.id}/checkpoints/weights/one")
        assert answer.status_code == 204
        gate.run(gate.gateway.collect(run.id))
        run.die()
        run.backward(5)
        assert run.outcome(5).status_code == 200
        assert [kind for kind, _ in run.newest.applied][-2:] == ["load", "forward_backward"]


def test_what_ended_badly_ends_so_when_it_is_replayed(start, new_run):
    with start(recovery=SELDOM) as gate:
        run = new_run(gate)
        run.trainer.fail_with[2] = GradientsNotFinite("the norm is nan")
        run.backward(1)
        run.step(2)
        assert run.outcome(2).json()["type"] == "gradients_not_finite"
        run.die()
        run.backward(3)
        refused = run.outcome(3).json()
        assert "operation 2 ended differently when it was replayed" in refused["error"]


def test_without_recovery_a_trainer_that_dies_ends_its_run(start, new_run):
    with start(recovery={"enabled": False}) as gate:
        run = new_run(gate)
        train(run, 1)
        run.die()
        run.backward(3)
        refused = run.outcome(3).json()
        assert (refused["type"], "create the run again" in refused["error"]) == (
            "worker_died",
            True,
        )
        assert not snapshots(gate)


def test_a_client_may_turn_recovery_off_for_its_run(start):
    with start() as gate, gate.service() as service:
        metadata = {"tandem.recovery": "off"}
        training = service.create_lora_training_client("tiny:full", user_metadata=metadata).result()
        worker_id, _ = gate.worker("trainer")
        gate.run(gate.launcher.kill(worker_id, "it was killed by SIGKILL"))
        with pytest.raises(tinker.RequestFailedError, match="worker_died"):
            training.forward([supervised([1, 9])], "cross_entropy").result()
        wrong = {"tandem.recovery": "sometimes"}
        with pytest.raises(tinker.APIStatusError, match=r"tandem\.recovery"):
            service.create_lora_training_client("tiny:full", user_metadata=wrong).result()


def test_nothing_is_left_when_the_session_ends(start, new_run):
    with start(recovery=OFTEN) as gate:
        run = new_run(gate)
        train(run, 1, 2)
        wait_until(lambda: run_of(run).trainer.log.newest.step)
        run.die()
        train(run, 3)
        finish(run.client, run.session_id)
        data = gate.settings.data_dir
        wait_until(lambda: not gate.gateway.sessions.all())
        wait_until(lambda: not tree(data / "snapshots") | tree(data / "operations"))
        wait_until(lambda: not gate.gateway.checkpoints.snapshot_bytes)
        wait_until(lambda: not gate.gateway.pins.folders())
