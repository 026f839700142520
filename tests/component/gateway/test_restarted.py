"""Runs go on under the next gateway, with fake workers."""

from __future__ import annotations

import threading
from types import MappingProxyType

import pytest
import tinker
from sqlalchemy import func, select
from tinker import types

from gateway.runs.trainer_host import TrainerHost
from gateway.storage.tables import operations, usage
from tandem.wire.v1 import tinker_pb2
from tests.component.gateway.test_custom_loss_gateway import halved
from tests.component.gateway.test_step_times import seconds_between
from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.gateway.fake_trainer import FakeTrainer
from tests.support.gateway.running import forward_backward_bytes
from tests.support.gateway.runs import OFTEN, SELDOM, Run, run_of, snapshots, train, undisturbed
from tests.support.sdk import supervised
from tests.support.waiting import PATIENCE, wait_until


def new_run(gate) -> Run:
    session = gate.session_id()
    return seen_by(gate, gate.run_id(session))


def seen_by(gate, run: Run | str) -> Run:
    """The run after its client's first heartbeat to this gateway."""
    run_id = run if isinstance(run, str) else run.id
    session_id = run_id.partition(":")[0]
    client = gate.http()
    client.post("/api/v1/session_heartbeat", json={"session_id": session_id})
    trainer = gate.trainer_of(run_id)
    return Run(gate, run_id, trainer.spec.worker_id, trainer, client)


def test_a_run_goes_on_under_the_next_gateway(start):
    with start(recovery=SELDOM) as gate:
        run = new_run(gate)
        train(run, 1, 2)
        run.backward(5)
        run.outcome(5)
    with start(recovery=SELDOM) as gate:
        run = seen_by(gate, run)
        assert run.outcome(4).json()["metrics"] == {"grad_norm": 1.5}, "as it was answered before"
        assert run.step(6).status_code == 200
        assert run.outcome(6).json()["metrics"] == {"grad_norm": 1.5}
        assert run.newest.history == undisturbed(3)
        assert [seq for _, seq in run.newest.applied] == [1, 2, 3, 4, 5, 6]
        steps = run.client.get(f"/api/tandem/v1/runs/{run.id}/steps").json()["steps"]
        assert [row["step"] for row in steps] == [1, 2, 3]
        seconds = steps[2]["metrics"]
        apart = seconds_between(steps[1], steps[2])
        assert seconds["seconds/step"] == pytest.approx(apart, rel=0.03, abs=0.05)
        assert seconds["seconds/queue"] > 0, "nobody knows more of the time before the start"
        gate.run(gate.gateway.usage.write)
        gate.run(gate.gateway.database.flush())
        counted = select(usage.c.event, func.sum(usage.c.count)).group_by(usage.c.event)
        rows = gate.run(gate.gateway.database.read(counted))
        assert {tuple(row.values()) for row in rows} == {("forward_backward", 3), ("optim_step", 3)}


def test_runs_that_shared_a_trainer_share_the_next_gateways(start, monkeypatch):
    monkeypatch.setattr("gateway.runs.registry._READ_TOGETHER", 2)
    with start(recovery=SELDOM) as gate:
        runs = [Run.new(gate, rank=8) for _ in range(3)]
        for steps, run in enumerate(runs, start=1):
            train(run, *range(1, steps + 1))
    with start(recovery=SELDOM) as gate:
        runs = [seen_by(gate, run) for run in runs]
        for steps, run in enumerate(runs, start=1):
            train(run, steps + 1)
            assert run.state.history == undisturbed(steps + 1)
        assert len(gate.launcher.trainers) == 1


def test_a_fault_while_a_trainer_is_taken_up_does_not_hang_its_clients(start, monkeypatch):
    async def broken(*_args, **_more):
        raise RuntimeError("a fault of ours")

    with start(recovery=SELDOM) as gate:
        run = new_run(gate)
        train(run, 1, 2)
    monkeypatch.setattr(TrainerHost, "take_up", broken)
    with start(recovery=SELDOM) as gate:
        run = seen_by(gate, run)
        train(run, 3)
        assert run.newest.history == undisturbed(3)


def test_the_next_gateway_replays_with_the_micro_batches_that_fitted_into_memory(start):
    class Small(FakeTrainer):
        memory = MappingProxyType({3: 1500})

    with start(recovery=SELDOM, launcher=FakeLauncher(Small)) as gate:
        run = new_run(gate)
        train(run, 1, 2)
    with start(recovery=SELDOM, launcher=FakeLauncher(Small)) as gate:
        run = seen_by(gate, run)
        train(run, 3)
        plans = [request.micro_batch_tokens for request in run.newest.requests[:4:2]]
        assert plans == [2048, 1024]
        assert run.newest.history == undisturbed(3)


def test_what_was_under_way_or_waited_ends_without_being_sent_again(start):
    with start(recovery=SELDOM) as gate:
        run = new_run(gate)
        train(run, 1)
        run.hold()
        large = forward_backward_bytes(run.id, 3, tokens=40_000)
        for answer in (run.backward(3, large), run.step(4), run.backward(6), run.step(7)):
            assert answer.status_code == 200
        refused = run.client.post("/api/v1/optim_step", json={"model_id": run.id, "seq_id": 8})
        assert refused.status_code == 200
    with start(recovery=SELDOM) as gate:
        run = seen_by(gate, run)
        assert run.outcome(3).status_code == 200
        assert run.outcome(4).json()["metrics"]
        run.backward(5)
        assert [run.outcome(seq).status_code for seq in (5, 6, 7)] == [200, 200, 200]
        assert run.outcome(8).json()["type"] == "optimizer_setting"
        assert [seq for _, seq in run.newest.applied] == [1, 2, 3, 4, 5, 6, 7]
        assert len(run.newest.requests[2].payload) == len(large)


def test_a_snapshot_outlives_the_gateway_and_what_it_covers_is_gone(start):
    with start(recovery=OFTEN) as gate:
        run = new_run(gate)
        for number in (1, 2, 3):
            train(run, number)
            wait_until(lambda n=number: run_of(run).log.newest.step == n)
        wait_until(lambda: len(snapshots(gate)) == 2)
    with start(recovery=OFTEN) as gate:
        assert [folder.name[:8] for folder in snapshots(gate)] == ["00000002", "00000003"]
        kept = select(operations.c.seq_id).where(operations.c.call.is_not(None))
        rows = gate.run(gate.gateway.database.read(kept))
        assert [row["seq_id"] for row in rows] == [5, 6]
        run = seen_by(gate, run)
        train(run, 4)
        assert run.newest.history == undisturbed(4)
        assert [seq for _, seq in run.newest.applied] == [7, 8]
        wait_until(lambda: gate.gateway.checkpoints.snapshot_bytes == {"local": 200})


def test_a_trainer_starts_when_the_client_is_heard_of(start):
    with start(recovery=SELDOM) as gate:
        run = new_run(gate)
        train(run, 1)
    with start(recovery=SELDOM) as gate:
        (row,) = gate.http().get("/api/tandem/v1/status").json()["runs"]
        assert "starts when its client is heard of" in row["reason"]
        assert gate.launcher.specs == []
        train(seen_by(gate, run), 2)


def test_a_save_just_after_a_restart_waits_until_its_size_is_known(start):
    with start(recovery=SELDOM) as gate:
        run = new_run(gate)
        train(run, 1)
    with start(recovery=SELDOM, limit={"checkpoint_bytes": 50}) as gate:
        run = seen_by(gate, run)
        body = {"model_id": run.id, "seq_id": 3, "path": "too-large"}
        run.client.post("/api/v1/save_weights", json=body)
        assert run.outcome(3).json()["type"] == "limit_exceeded"


def test_a_run_that_is_not_to_be_restored_ends_with_its_gateway(start):
    with start(recovery={"enabled": False}) as gate:
        run = new_run(gate)
        train(run, 1)
        run.hold()
        run.step(3)
    with start(recovery={"enabled": False}) as gate:
        for seq_id in (3, 4):
            gate.http().post("/api/v1/optim_step", json={"model_id": run.id, "seq_id": seq_id})
            assert gate.retrieve(f"{run.id}:{seq_id}").json()["type"] == "gateway_restarted"
        assert gate.retrieve(f"{run.id}:2").json()["metrics"]


def test_a_batch_that_was_refused_before_the_restart_is_missing_after_it(start):
    with start(recovery=SELDOM) as gate:
        run = new_run(gate)
        train(run, 1)
        unknown = tinker_pb2.ForwardBackwardRequest(model_id=run.id, seq_id=3, loss_fn="custom")
        unknown.loss_fn_config_v2["loss_id"].text = "none"
        run.backward(3, unknown.SerializeToString())
        assert run.outcome(3).json()["type"] == "unknown_loss"
    with start(recovery=SELDOM) as gate:
        run = seen_by(gate, run)
        run.step(4)
        run.outcome(4)
        assert (
            "operation 3, a forward_backward" in run.newest.requests[-1].header.gradients_incomplete
        )


def test_saves_are_there_once_and_loads_are_made_again(start):
    with start(recovery=SELDOM) as gate:
        run = new_run(gate)
        train(run, 1)
        place = {"model_id": run.id, "seq_id": 3, "path": "one"}
        run.client.post("/api/v1/save_weights", json=place)
        path = run.outcome(3).json()["path"]
        run.client.post(
            "/api/v1/load_weights",
            json={"model_id": run.id, "seq_id": 4, "path": path, "optimizer": True},
        )
        assert run.outcome(4).status_code == 200
        run.hold()
        run.client.post("/api/v1/save_weights", json=place | {"seq_id": 5, "path": "two"})
        run.client.post(
            "/api/v1/load_weights", json={"model_id": run.id, "seq_id": 6, "path": path}
        )
    with start(recovery=SELDOM) as gate:
        run = seen_by(gate, run)
        assert run.outcome(5).json()["path"].endswith("/two")
        assert run.outcome(6).json()["path"] == path
        kinds = [kind for kind, _ in run.newest.applied]
        assert kinds == ["load", "save", "load"], "it began with the first save"
        listed = run.client.get(f"/api/v1/training_runs/{run.id}/checkpoints").json()
        assert len(listed["checkpoints"]) == 2


def test_a_custom_loss_is_computed_again_from_its_definition(start):
    with start(recovery=SELDOM) as gate:
        service = gate.service()
        training = service.create_lora_training_client("tiny:full").result()
        loss = service.create_custom_loss(halved, input_ranks={"logprobs": 1}).result()
        training.forward_backward_custom([supervised([1, 9])], loss).result()
        definition = gate.worker("trainer")[1].requests[0]
    with start(recovery=SELDOM) as gate:
        run = seen_by(gate, training.model_id)
        wait_until(lambda: run.newest.applied)
        assert run.newest.requests[0].loss_definition == definition.loss_definition != b""
        service.close("finished")


def test_an_unmodified_script_goes_on_when_its_gateway_restarts(start):
    going, restarted, done = threading.Event(), threading.Event(), []

    def script(url: str) -> None:
        service = tinker.ServiceClient(base_url=url, api_key="tml-test-key")
        training = service.create_lora_training_client("tiny:full").result()
        for step in range(6):
            if step == 3:
                going.set()
                restarted.wait(PATIENCE)
            batch = training.forward_backward([supervised([1, 9])], "cross_entropy")
            update = training.optim_step(types.AdamParams())
            done.append((batch.result().metrics, update.result().metrics))
            if step % 2:
                training.save_weights_for_sampler(f"v{step}").result()
        service.close("finished")

    with start(recovery=SELDOM) as gate:
        thread = threading.Thread(target=script, args=(gate.url,), daemon=True)
        thread.start()
        assert going.wait(PATIENCE)
    with start(recovery=SELDOM) as gate:
        restarted.set()
        thread.join(2 * PATIENCE)
        assert len(done) == 6
        trainer = gate.worker("trainer")[1]
        assert trainer.step == 6


def test_a_sampler_that_was_loading_a_published_version_loads_it_again(start):
    with start(recovery=SELDOM) as gate:
        run = new_run(gate)
        train(run, 1)
        gate.launcher.start_error["sampler"] = ""
        gate.run(gate.launcher.start_gate.clear)  # no engine starts
        body = {"model_id": run.id, "seq_id": 3, "sampling_session_seq_id": 7}
        run.client.post("/api/v1/save_weights_for_sampler", json=body)
        train_from(run, 4)
        assert gate.gateway.runs.get(run.id).dispatcher.queued == 1
    with start(recovery=SELDOM) as gate:
        run = seen_by(gate, run)
        session = run.outcome(3).json()["sampling_session_id"]
        assert session == f"{run.session_id}:sample:7"
        assert [kind for kind, _ in run.newest.applied].count("publish") == 0
        train_from(run, 6)
        assert [seq for _, seq in run.newest.applied] == [1, 2, 4, 5, 6, 7]


def train_from(run: Run, seq_id: int) -> None:
    assert run.backward(seq_id).status_code == 200
    assert run.step(seq_id + 1).status_code == 200
    assert run.outcome(seq_id + 1).json()["metrics"]
