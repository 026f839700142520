"""Engines load a version while its files are synced, with fake workers."""

from __future__ import annotations

import asyncio

from tandem.errors import PublishFailed
from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.gateway.fake_sampler import FakeSampler
from tests.support.gateway.fake_trainer import FakeTrainer, after, die
from tests.support.gateway.requests import asample, why_waiting
from tests.support.gateway.runs import SELDOM, Run, train, undisturbed
from tests.support.waiting import wait_until


class Slow(FakeTrainer):
    """Its first process never syncs a version."""

    count = 0

    def __init__(self, spec) -> None:
        super().__init__(spec)
        type(self).count += 1
        if self.count == 1:
            self.disk_gate.clear()


def slow_launcher() -> FakeLauncher:
    return FakeLauncher(type("OnceSlow", (Slow,), {}))


def publish(run: Run, seq_id: int) -> str:
    """Publish a version without a name, and return its operation's id."""
    body = {"model_id": run.id, "seq_id": seq_id, "sampling_session_seq_id": seq_id}
    answer = run.client.post("/api/v1/save_weights_for_sampler", json=body)
    assert answer.status_code == 200, answer.text
    return f"{run.id}:{seq_id}"


def begin(run: Run) -> str:
    """Train a step, publish, and send another step. Return the publish's id."""
    train(run, 1)
    operation = publish(run, 3)
    run.backward(4)
    run.step(5)
    return operation


def loaded(gate) -> list[str]:
    workers = gate.launcher.servicers.values()
    return [name for each in workers if isinstance(each, FakeSampler) for name in each.loaded]


def history() -> str:
    """A trainer's history after `begin`."""
    return after(after(undisturbed(1), "forward_backward", 4), "optim_step", 5)


def sampler_of(run: Run, seq_id: int = 3) -> str:
    return f"{run.id.partition(':')[0]}:sample:{seq_id}"


def test_an_engine_loads_and_samples_while_files_are_synced_and_later_operations_wait(start):
    with start(recovery=SELDOM, launcher=slow_launcher()) as gate:
        run = Run.new(gate)
        train(run, 1)
        assert gate.retrieve(publish(run, 3)).json()["sampling_session_id"] == sampler_of(run)
        assert len(loaded(gate)) == 1
        run.step(4)
        wait_until(lambda: ("optim_step", 4) in run.newest.applied)
        assert why_waiting(run.client, f"{run.id}:4")
        sample = asample(run.client, sampler_of(run))
        assert gate.retrieve(sample.json()["request_id"]).status_code == 200
        assert why_waiting(run.client, f"{run.id}:4")

        async def join() -> int:
            """Another client joins once the sampling session has its row."""
            joining = asyncio.ensure_future(gate.gateway.sampling.join(sampler_of(run)))
            done, _ = await asyncio.wait({joining}, timeout=0.05)
            assert not done
            run.newest.disk_gate.set()
            return await joining

        assert gate.run(join()) == 1
        run.outcome(4)


def test_weights_that_are_lost_after_their_client_has_them_are_told_to_their_samples(start):
    with start(recovery=SELDOM, launcher=slow_launcher()) as gate:
        run = Run.new(gate)
        train(run, 1)
        assert gate.retrieve(publish(run, 3)).status_code == 200
        run.newest.disk_error = PublishFailed("the disk failed; publish again")
        gate.run(run.newest.disk_gate.set)
        run.step(4)
        run.outcome(4)
        refused = asample(run.client, sampler_of(run))
        assert refused.status_code == 404
        assert "are lost: the disk failed; publish again" in refused.text
        known = gate.gateway.sampling.known(sampler_of(run))
        assert gate.run(known), "its samples are gone, not unknown"
        run.newest.disk_error = None
        assert gate.retrieve(publish(run, 5)).status_code == 200
        assert asample(run.client, sampler_of(run, 5)).status_code == 200


def test_time_after_the_result_counts_as_samples_and_not_as_queue(start):
    with start(recovery=SELDOM, launcher=slow_launcher()) as gate:
        run = Run.new(gate)
        train(run, 1)
        operation = publish(run, 3)
        assert gate.retrieve(operation).status_code == 200
        sample = asample(run.client, sampler_of(run))
        assert gate.retrieve(sample.json()["request_id"]).status_code == 200
        gate.run(run.newest.disk_gate.set)
        wait_until(lambda: not gate.gateway.futures.get(operation).unrecorded)
        run.step(4)
        run.outcome(4)
        steps = run.client.get(f"/api/tandem/v1/runs/{run.id}/steps").json()["steps"]
        assert steps[-1]["metrics"]["seconds/samples"] > 0


def test_a_number_that_a_sampling_session_has_is_refused_and_the_run_goes_on(start):
    with start(recovery=SELDOM, launcher=slow_launcher()) as gate:
        run = Run.new(gate)
        train(run, 1)
        assert gate.retrieve(publish(run, 3)).status_code == 200
        gate.run(run.newest.disk_gate.set)
        body = {"model_id": run.id, "seq_id": 4, "sampling_session_seq_id": 3}
        run.client.post("/api/v1/save_weights_for_sampler", json=body)
        assert "there is a sampling session" in gate.retrieve(f"{run.id}:4").text
        run.step(5)
        run.outcome(5)
        assert asample(run.client, sampler_of(run)).status_code == 200


def test_a_trainer_that_dies_before_the_sync_is_followed_by_one_that_publishes_again(start):
    with start(recovery=SELDOM, launcher=slow_launcher()) as gate:
        run = Run.new(gate)
        operation = begin(run)
        wait_until(lambda: ("optim_step", 5) in run.newest.applied)
        run.die()
        assert gate.retrieve(operation).status_code == 200
        run.outcome(5)
        kinds = [kind for kind, seq in run.newest.applied if seq >= 3]
        assert kinds == ["publish", "forward_backward", "optim_step"]
        assert run.newest.history == history()


def test_the_next_gateway_publishes_again_what_was_not_durable(start):
    with start(recovery=SELDOM, launcher=slow_launcher()) as gate:
        run = Run.new(gate)
        operation = begin(run)
        wait_until(lambda: ("optim_step", 5) in run.newest.applied)
        assert gate.retrieve(operation).status_code == 200
    with start(recovery=SELDOM) as gate, gate.http() as client:
        client.post("/api/v1/session_heartbeat", json={"session_id": run.id.partition(":")[0]})
        assert asample(client, sampler_of(run)).status_code == 200, "it waits for the session"
        assert gate.retrieve(operation).status_code == 200
        assert gate.retrieve(f"{run.id}:5").status_code == 200
        trainer = gate.trainer_of(run.id)
        kinds = [kind for kind, seq in trainer.applied if seq >= 3]
        assert kinds == ["publish", "forward_backward", "optim_step"]
        assert trainer.history == history()


def test_a_sync_that_fails_is_told_and_training_goes_on(start):
    with start(recovery=SELDOM) as gate:
        run = Run.new(gate)
        train(run, 1)
        run.newest.disk_error = PublishFailed("the disk failed; publish again")
        failed = gate.retrieve(publish(run, 3)).json()
        assert "the disk failed" in str(failed)
        run.newest.disk_error = None
        assert gate.retrieve(publish(run, 4)).status_code == 200
        train(run, 3)


def test_a_failed_sync_does_not_wait_for_the_engine(start):
    with start(recovery=SELDOM) as gate:
        run = Run.new(gate)
        train(run, 1)
        assert gate.retrieve(publish(run, 3)).status_code == 200
        engine = gate.worker("sampler")[1]
        gate.run(lambda: engine.slow_loads.update({2: asyncio.Event()}))
        run.newest.disk_error = PublishFailed("the disk failed; publish again")
        operation = publish(run, 4)
        run.step(5)
        assert "the disk failed" in str(gate.retrieve(operation).json())
        run.outcome(5)


def test_a_trainer_that_dies_right_after_its_early_answer_is_asked_again(start):
    class Dies(FakeTrainer):
        """Its first process ends when it is asked for the sync."""

        async def AwaitPublished(self, request, context):
            if len(self.launcher.trainers) == 1:
                await die(self, "it was killed by SIGKILL")
            return await super().AwaitPublished(request, context)

    with start(recovery=SELDOM, launcher=FakeLauncher(Dies)) as gate:
        run = Run.new(gate)
        operation = begin(run)
        assert gate.retrieve(operation).status_code == 200
        run.outcome(5)
        assert [kind for kind, seq in run.newest.applied if seq == 3] == ["publish"]
        assert run.newest.history == history()
