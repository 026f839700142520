"""Dying workers, failing engines, and a restarting gateway."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import pytest
import tinker
from tinker import types

from gateway.workers.clients import TrainerClient
from tandem.errors import LoadFailed, PublishFailed
from tandem.protocol.worker import PROTOCOL, own_version
from tests.support.gateway.fake_launcher import FakeLauncher, of_version
from tests.support.gateway.requests import asample, create_sampler, optim_step
from tests.support.gateway.running import running_gateway
from tests.support.sdk import supervised
from tests.support.waiting import wait_until

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=3)


@pytest.fixture
def gate(tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate:
        yield gate


def training_client(service):
    return service.create_lora_training_client("tiny:full").result()


def test_a_trainer_that_dies_unrestored_fails_what_waits_and_a_new_run_can_be_made(tmp_path):
    settings = {"session_ttl": 600, "recovery": {"enabled": False}}
    with running_gateway(tmp_path, **settings) as gate, gate.service() as service:
        training = training_client(service)
        worker_id, trainer = gate.worker("trainer")
        gate.run(trainer.gate.clear)
        futures = [
            training.forward_backward([supervised([1, 9])], "cross_entropy") for _ in range(6)
        ]
        run = gate.gateway.runs.get(training.model_id)
        wait_until(lambda: run.dispatcher.queued == 6)
        gate.run(gate.launcher.kill(worker_id, "rank 1 was killed by SIGKILL"))
        for future in futures:
            with pytest.raises(tinker.RequestFailedError, match=r"worker_died.*SIGKILL") as caught:
                future.result()
            assert caught.value.category is types.RequestErrorCategory.Server
        with pytest.raises(tinker.RequestFailedError, match="rank 1 was killed"):
            training.optim_step(types.AdamParams()).result()
        again = training_client(service)
        assert again.forward_backward([supervised([1, 9])], "cross_entropy").result().metrics


def test_a_trainer_that_cannot_start_fails_the_creation_with_its_reason(gate):
    gate.launcher.start_error["trainer"] = "the model does not fit into memory"
    with (
        gate.service() as service,
        pytest.raises(tinker.RequestFailedError, match=r"worker_start_failed.*does not fit"),
    ):
        training_client(service)


def test_a_worker_that_crashes_at_its_start_is_started_once_more(gate):
    gate.launcher.crashes = 1
    with gate.service() as service:
        assert training_client(service).get_info().model_id
        gate.launcher.crashes = 100
        with pytest.raises(tinker.RequestFailedError, match=r"worker_crashed.*SIGSEGV"):
            training_client(service)


def test_a_fault_of_ours_while_a_run_starts_is_told(gate, monkeypatch):
    async def odd(_client):
        raise RuntimeError("odd")

    monkeypatch.setattr(TrainerClient, "describe", odd)
    with (
        gate.service() as service,
        pytest.raises(tinker.RequestFailedError, match=r"internal_error.*RuntimeError"),
    ):
        training_client(service)


def test_a_fault_of_ours_while_a_sampler_starts_is_told(gate, monkeypatch):
    def odd(*_parts, **_about):
        raise RuntimeError("odd")

    monkeypatch.setattr("gateway.workers.processes.Worker.of", odd)
    with gate.service() as service:
        sampling = service.create_sampling_client(base_model="tiny").result()
        with pytest.raises(
            tinker.RequestFailedError, match="RuntimeError in the gateway while it started"
        ):
            sampling.sample(PROMPT, 1, PARAMS).result()


def test_a_sampler_that_dies_is_started_again_and_its_samples_are_repeated(gate):
    with gate.service() as service:
        sampling = service.create_sampling_client(base_model="tiny").result()
        worker_id, sampler = gate.worker("sampler")
        gate.run(sampler.gate.clear)
        future = sampling.sample(PROMPT, 1, PARAMS)
        wait_until(lambda: sampler.requests)
        gate.run(gate.launcher.kill(worker_id, "it was killed by SIGKILL"))
        assert list(future.result().sequences[0].tokens) == [3, 2, 1]
        assert gate.worker("sampler")[0] != worker_id


def test_a_sampler_that_cannot_start_fails_its_samples_and_is_tried_again(gate):
    gate.launcher.start_error["sampler"] = "no memory for the cache"
    with gate.service() as service:
        sampling = service.create_sampling_client(base_model="tiny").result()
        with pytest.raises(tinker.RequestFailedError, match=r"worker_start_failed.*no memory"):
            sampling.sample(PROMPT, 1, PARAMS).result()
        gate.launcher.start_error.clear()
        assert sampling.sample(PROMPT, 1, PARAMS).result().sequences


def test_a_failed_load_is_told_and_the_version_before_goes_on_serving(gate):
    with gate.service() as service:
        training = training_client(service)
        first = training.save_weights_and_get_sampling_client().result()
        _, sampler = gate.worker("sampler")
        sampler.load_error = LoadFailed("the canary differs")
        with pytest.raises(tinker.RequestFailedError, match="load_failed: the canary differs"):
            training.save_weights_and_get_sampling_client().result()
        first.sample(PROMPT, 1, PARAMS).result()
        assert sampler.requests[-1].version.name == sampler.loaded[0]


def test_a_failed_publish_is_told_and_the_run_goes_on(gate):
    with gate.service() as service:
        training = training_client(service)
        _, trainer = gate.worker("trainer")
        trainer.fail_with[1] = PublishFailed("rank 0 could not write")
        with pytest.raises(tinker.RequestFailedError, match="publish_failed"):
            training.save_weights_for_sampler("one").result()
        assert training.save_weights_for_sampler("one").result().path.endswith("/one")


def test_a_full_disk_is_said_before_anything_is_written(tmp_path):
    with (
        running_gateway(tmp_path, session_ttl=600, min_free_bytes=2**62) as gate,
        gate.service() as service,
    ):
        training = training_client(service)
        with pytest.raises(tinker.RequestFailedError, match="storage_full"):
            training.save_weights_for_sampler("one").result()
        assert gate.worker("trainer")[1].applied == []
        assert training.optim_step(types.AdamParams()).result().metrics


def test_after_a_restart_runs_that_are_not_restored_say_so_and_checkpoints_stay(tmp_path):
    unrestored = {"session_ttl": 600, "recovery": {"enabled": False}}
    with running_gateway(tmp_path, **unrestored) as gate:
        session = gate.session_id()
        run_id = gate.run_id(session)
        _, trainer = gate.worker("trainer")
        with gate.http() as client:
            place = {"model_id": run_id, "seq_id": 1, "path": "warm-up"}
            client.post("/api/v1/save_weights", json=place)
            gate.retrieve(f"{run_id}:1")
            create_sampler(client, session)
            gate.run(trainer.gate.clear)
            optim_step(client, run_id, 2)
    with running_gateway(tmp_path, **unrestored) as gate, gate.http() as client:
        assert gate.retrieve(f"{run_id}:1").json()["path"] == f"tinker://{run_id}/weights/warm-up"
        assert gate.retrieve(f"{run_id}:2").json()["type"] == "gateway_restarted"
        later = optim_step(client, run_id, 3)
        assert gate.retrieve(later.json()["request_id"]).json()["type"] == "gateway_restarted"
        assert gate.retrieve(f"{session}:sample:0:7").status_code == 410
        assert gate.retrieve(f"{session}:sample:9:7").status_code == 404
        load = {
            "session_id": session,
            "model_seq_id": 1,
            "path": f"tinker://{run_id}/weights/warm-up",
            "optimizer": True,
        }
        created = client.post("/api/v1/load_weights", json=load).json()
        assert gate.retrieve(created["request_id"]).json()["model_id"] == f"{session}:train:1"
        assert gate.worker(f"trainer-{session}")[1].applied == [("load", 0)]


def test_a_second_gateway_on_the_same_data_directory_is_refused(gate):
    result = subprocess.run(
        [sys.executable, "-m", "gateway"],
        env={"TANDEM_DATA_DIR": str(gate.settings.data_dir), "TANDEM_PORT": "0", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 1
    assert "another gateway uses the data directory" in result.stderr.splitlines()[-1]


def test_a_gateway_says_in_one_sentence_that_it_does_not_know_a_database(tmp_path):
    with closing(sqlite3.connect(tmp_path / "tandem.db")) as database, database:
        database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        database.execute("INSERT INTO alembic_version VALUES ('0015')")
    result = subprocess.run(
        [sys.executable, "-m", "gateway"],
        env={"TANDEM_DATA_DIR": str(tmp_path), "TANDEM_PORT": "0", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "the database has the schema '0015'" in result.stderr.splitlines()[-1]


def test_a_worker_that_does_not_answer_its_heartbeat_is_shown_as_such(tmp_path, capfd):
    with (
        running_gateway(tmp_path, session_ttl=600, worker_heartbeat=0.05) as gate,
        gate.http() as client,
    ):
        health = gate.launcher.health
        session = gate.session_id()
        run_id = gate.run_id(session)
        sampler_id = create_sampler(client, session).json()["sampling_session_id"]
        workers = [gate.worker(kind)[1] for kind in ("trainer", "sampler")]
        for worker in workers:
            gate.run(worker.gate.clear)
        gate.run(health.answering.clear)
        requests = [
            optim_step(client, run_id, 1).json()["request_id"],
            asample(client, sampler_id).json()["request_id"],
        ]

        def states(rows: str) -> list[str]:
            return [row["state"] for row in client.get("/api/tandem/v1/status").json()[rows]]

        wait_until(lambda: states("workers") == ["unresponsive", "unresponsive"])
        status = client.get("/api/tandem/v1/status").json()
        for kind, request in zip(("trainer", "sampler"), requests, strict=True):
            told = f"the {kind} has not answered its heartbeat for "
            (row,) = status["runs" if kind == "trainer" else "samplers"]
            assert row["reason"].startswith(told)
            waiting = client.post("/api/v1/retrieve_future", json={"request_id": request}).json()
            assert waiting["queue_state"] == "paused_capacity"
            assert waiting["queue_state_reason"].startswith(told)
        gate.run(health.answering.set)
        for worker in workers:
            gate.run(worker.gate.set)
        wait_until(lambda: states("workers") == ["ready", "ready"])
        assert all(gate.retrieve(request).is_success for request in requests)
    log = "".join(capfd.readouterr())
    assert min(log.count("worker_unresponsive"), log.count("worker_answers_again")) >= 2


def test_a_worker_of_another_version_is_told_of_and_works_on(tmp_path, capfd):
    with (
        running_gateway(tmp_path, session_ttl=600, worker_heartbeat=0.05) as gate,
        gate.http() as client,
    ):
        gate.launcher.health.about = of_version("0.0.9")
        run_id = gate.run_id(gate.session_id())
        worker_id, _ = gate.worker("trainer")

        def status() -> dict:
            return client.get("/api/tandem/v1/status").json()

        wait_until(lambda: status()["workers"][0]["version"] == "0.0.9")
        (warning,) = status()["warnings"]
        assert f"the gateway has Tandem {own_version()}, and 0.0.9 have: {worker_id};" in warning
        assert gate.retrieve(optim_step(client, run_id, 1).json()["request_id"]).is_success
    assert "".join(capfd.readouterr()).count("worker_of_another_version") == 1


class OldUntilKilled(FakeLauncher):
    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        await super().stop(worker_id, at_once=at_once)
        self.health.about = of_version(own_version())


def test_a_worker_that_speaks_another_protocol_is_replaced(tmp_path):
    launcher = OldUntilKilled()
    launcher.health.about = of_version("0.0.9", protocol=PROTOCOL - 1)
    with (
        running_gateway(
            tmp_path, launcher=launcher, session_ttl=600, worker_heartbeat=0.05
        ) as gate,
        gate.http() as client,
    ):
        run_id = gate.run_id(gate.session_id())
        first, _ = gate.worker("trainer")
        wait_until(lambda: launcher.stopped == [first])
        assert gate.retrieve(optim_step(client, run_id, 1).json()["request_id"]).is_success
        assert [spec.kind for spec in launcher.specs] == ["trainer", "trainer"]
        assert client.get("/api/tandem/v1/status").json()["warnings"] == []


class FrozenUntilKilled(FakeLauncher):
    def __init__(self) -> None:
        super().__init__()
        self.relent = lambda: None

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        await super().stop(worker_id, at_once=at_once)
        if at_once:
            self.relent()
            self.health.answering.set()


@pytest.mark.parametrize("kind", ["trainer", "sampler"])
def test_a_worker_that_answers_no_heartbeat_for_too_long_is_killed(tmp_path, monkeypatch, kind):
    with (
        running_gateway(
            tmp_path, launcher=FrozenUntilKilled(), session_ttl=600, worker_heartbeat=0.05
        ) as gate,
        gate.http() as client,
    ):
        session = gate.session_id()
        if kind == "trainer":
            run_id = gate.run_id(session)
        else:
            sampler_id = create_sampler(client, session).json()["sampling_session_id"]
            gate.retrieve(asample(client, sampler_id, 0).json()["request_id"])
        worker_id, worker = gate.worker(kind)
        gate.run(worker.gate.clear)
        gate.run(gate.launcher.health.answering.clear)
        gate.launcher.relent = monkeypatch.undo
        roster = gate.gateway.supervisor.roster
        monkeypatch.setattr(roster, "budgets", replace(roster.budgets, silence=0.1))
        if kind == "trainer":
            answer = gate.retrieve(optim_step(client, run_id, 1).json()["request_id"])
        else:
            answer = gate.retrieve(asample(client, sampler_id, 1).json()["request_id"])
        assert answer.is_success, "by the next worker"
        assert len([spec for spec in gate.launcher.specs if spec.kind == kind]) == 2
        assert gate.launcher.stopped[0] == worker_id


def test_an_engine_that_answers_heartbeats_alone_is_killed_and_replaced(tmp_path):
    with (
        running_gateway(tmp_path, session_ttl=600, operation_timeout=3) as gate,
        gate.http() as client,
    ):
        session = gate.session_id()
        sampler_id = create_sampler(client, session).json()["sampling_session_id"]
        gate.retrieve(asample(client, sampler_id, 0).json()["request_id"])
        worker_id, engine = gate.worker("sampler")
        gate.run(engine.gate.clear)
        failed = gate.retrieve(asample(client, sampler_id, 1).json()["request_id"]).json()
        assert (failed["type"], "has answered nothing" in failed["error"]) == (
            "operation_timed_out",
            True,
        )
        wait_until(lambda: gate.launcher.stopped == [worker_id])
        answer = gate.retrieve(asample(client, sampler_id, 2).json()["request_id"])
        assert answer.is_success, "by the next engine"
