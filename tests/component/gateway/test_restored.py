"""Dead trainers are restored, with fake workers."""

from __future__ import annotations

import threading

import pytest
import tinker
from sqlalchemy import func, select

from gateway.storage.tables import usage
from gateway.workers.demand import Backoff
from tandem.errors import CheckpointDamaged, CustomLossFailed, GradientsNotFinite
from tests.support.files import tree
from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.gateway.fake_trainer import FakeTrainer, die, dies_at
from tests.support.gateway.requests import finish
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
from tests.support.sdk import supervised
from tests.support.waiting import until, wait_until


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


def test_what_was_applied_is_replayed_in_order_and_recorded_once(start):
    with start(recovery=SELDOM) as gate:
        run = Run.new(gate)
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


def test_a_client_is_told_what_is_restored(start):
    released = threading.Event()

    class Held(FakeTrainer):
        """Restores nothing until it is released."""

        async def Restore(self, request, context):
            await until(released.is_set)
            return await super().Restore(request, context)

    with start(recovery=SELDOM, launcher=FakeLauncher(Held)) as gate:
        run = Run.new(gate)
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
        wait_until(lambda: "s): its pod is not scheduled" in reason())
        released.set()
        gate.run(gate.launcher.start_gate.set)
        run.outcome(3)


def test_an_operation_that_kills_its_trainer_three_times_ends_the_run(start):
    launcher = FakeLauncher(dies_at(5))
    with start(recovery=OFTEN, launcher=launcher) as gate:
        run = Run.new(gate)
        for number in (1, 2):
            train(run, number)
            wait_until(lambda n=number: run_of(run).log.newest.step == n)
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


def test_a_trainer_that_dies_while_it_is_restored_is_restored_again(start):
    class DiesOnce(FakeTrainer):
        async def OptimStep(self, request, context):
            if len(made) == 1 and request.header.seq_id - 1 == 4:
                made.append(self)
                await die(self, "it was killed by SIGKILL")
            return await super().OptimStep(request, context)

    made: list[FakeTrainer] = []
    launcher = FakeLauncher(DiesOnce)
    with start(recovery=SELDOM, launcher=launcher) as gate:
        run = Run.new(gate)
        train(run, 1, 2, 3)
        made.append(run.newest)
        run.die()
        train(run, 4)
        assert len(made) == 2
        assert run.newest.history == undisturbed(4)


def test_a_trainer_that_does_not_start_again_ends_the_run_with_its_reason(start, no_wait):
    with start(recovery=SELDOM) as gate:
        run = Run.new(gate)
        train(run, 1)
        gate.launcher.start_error["trainer"] = "the GPU is gone"
        run.die()
        run.backward(3)
        refused = run.outcome(3).json()
        assert refused["type"] == "worker_start_failed"
        assert "the GPU is gone; create the run again" in refused["error"]


def test_a_trainer_that_dies_again_and_again_after_some_work_does_not_wait_longer_each_time(
    start, monkeypatch
):
    waits = []
    failed = Backoff.failed

    def noted(backoff: Backoff) -> float:
        waits.append(failed(backoff))
        return 0.0

    monkeypatch.setattr(Backoff, "failed", noted)
    with start(recovery=SELDOM) as gate:
        run = Run.new(gate)
        for number in (1, 2, 3, 4):
            train(run, number)
            run.die()
        train(run, 5)
        assert run.newest.history == undisturbed(5)
    assert len(waits) == 4
    assert max(waits) == 0


def test_a_load_is_replayed_even_if_its_owner_deleted_the_checkpoint_since(start):
    with start(recovery=SELDOM) as gate:
        run = Run.new(gate)
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


def load_from(run: Run, seq_id: int, path: str) -> None:
    run.client.post(
        "/api/v1/load_weights", json={"model_id": run.id, "seq_id": seq_id, "path": path}
    )


def test_a_load_that_failed_is_not_replayed(start):
    with start(recovery=SELDOM) as gate:
        run = Run.new(gate)
        train(run, 1)
        path = save(run, 3, "one")
        run.trainer.fail_with[4] = CheckpointDamaged("Input/output error")
        load_from(run, 4, path)
        assert run.outcome(4).json()["type"] == "checkpoint_damaged"
        run.die()
        run.backward(5)
        assert run.outcome(5).status_code == 200
        assert run.newest.applied == [("forward_backward", 5)]  # the save serves as a snapshot


def test_a_load_that_meets_a_bad_disk_when_it_is_replayed_is_tried_again(start, monkeypatch):
    monkeypatch.setattr(Backoff, "failed", lambda _self: 0.0)
    begun: list[FakeTrainer] = []

    class Unlucky(FakeTrainer):
        def __init__(self, spec):
            super().__init__(spec)
            begun.append(self)
            if len(begun) in (2, 3):
                self.fail_with[4] = CheckpointDamaged("Input/output error")

    with start(recovery=SELDOM, launcher=FakeLauncher(Unlucky)) as gate:
        run = Run.new(gate)
        train(run, 1)
        path = save(run, 3, "one")
        load_from(run, 4, path)
        run.outcome(4)
        run.die()
        run.backward(5)
        assert run.outcome(5).status_code == 200
        assert len(begun) == 4


def test_a_custom_loss_that_takes_too_long_when_it_is_replayed_is_tried_again(start, monkeypatch):
    monkeypatch.setattr(Backoff, "failed", lambda _self: 0.0)
    begun: list[FakeTrainer] = []

    class Busy(FakeTrainer):
        def __init__(self, spec):
            super().__init__(spec)
            begun.append(self)
            if len(begun) == 2:
                self.fail_with[1] = CustomLossFailed("it took more than 30 s")

    with start(recovery=SELDOM, launcher=FakeLauncher(Busy)) as gate:
        run = Run.new(gate)
        train(run, 1)
        run.die()
        run.backward(3)
        assert run.outcome(3).status_code == 200
        assert len(begun) == 3


def test_a_custom_loss_that_failed_is_not_computed_again_and_a_step_hears_of_it(start):
    with start(recovery=SELDOM) as gate:
        run = Run.new(gate)
        train(run, 1)
        run.trainer.fail_with[3] = CustomLossFailed("it took more than 30 s")
        run.backward(3)
        assert run.outcome(3).json()["type"] == "custom_loss_failed"
        run.die()
        run.step(4)
        run.outcome(4)
        assert [seq_id for _, seq_id in run.newest.applied] == [1, 2, 4]
        told = [request.header.gradients_incomplete for request in run.newest.requests]
        assert told == ["", "", "it took more than 30 s"]
        run.die()
        run.backward(5)
        run.outcome(5)
        told = [request.header.gradients_incomplete for request in run.newest.requests]
        assert told == ["", "", "it took more than 30 s", ""]


def test_what_ended_badly_ends_so_when_it_is_replayed(start):
    with start(recovery=SELDOM) as gate:
        run = Run.new(gate)
        run.trainer.fail_with[2] = GradientsNotFinite("the norm is nan")
        run.backward(1)
        run.step(2)
        assert run.outcome(2).json()["type"] == "gradients_not_finite"
        run.die()
        run.backward(3)
        refused = run.outcome(3).json()
        assert "operation 2 ended differently when it was replayed" in refused["error"]


def test_without_recovery_a_trainer_that_dies_ends_its_run(start):
    with start(recovery={"enabled": False}) as gate:
        run = Run.new(gate)
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


def test_nothing_is_left_when_the_session_ends(start):
    with start(recovery=OFTEN) as gate:
        run = Run.new(gate)
        train(run, 1, 2)
        wait_until(lambda: run_of(run).log.newest.step)
        run.die()
        train(run, 3)
        finish(run.client, run.session_id)
        data = gate.settings.data_dir
        wait_until(lambda: not gate.gateway.sessions.all())
        wait_until(lambda: not tree(data / "snapshots") | tree(data / "operations"))
        wait_until(lambda: not gate.gateway.checkpoints.snapshot_bytes)
        wait_until(lambda: not gate.gateway.pins.folders())
