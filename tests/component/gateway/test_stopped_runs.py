"""Runs that somebody stops, with fake trainers."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from functools import partial

import httpx
import pytest
import tinker
from tinker import types

from gateway.owners.auth.keys import NewKey
from tandem.errors import StorageFailed
from tests.support.audit_log import audit_log
from tests.support.gateway.runs import OFTEN, SELDOM, Run, ended, run_of, save, train, undisturbed
from tests.support.postgres import locked_database, wait_for_no_lock
from tests.support.sdk import supervised
from tests.support.waiting import wait_until

OWN = "/api/tandem/v1"


@pytest.fixture
def start(start):
    return partial(start, recovery=SELDOM)


def stop(run: Run, *, discard: bool = False):
    answer = run.client.post(f"{OWN}/runs/{run.id}/stop", json={"discard": discard})
    assert answer.status_code == 200, answer.text
    return answer.json()


def stop_soon(run: Run, *, discard: bool = False) -> list[dict]:
    """Stop a run from another thread, and return when the end is decided."""
    answers: list[dict] = []

    def ask() -> None:
        with suppress(httpx.HTTPError):  # the gateway may end meanwhile
            answers.append(stop(run, discard=discard))

    threading.Thread(target=ask, daemon=True).start()
    wait_until(lambda: run_of(run).ending is not None)
    return answers


def test_the_running_operation_ends_queued_ones_fail_and_a_checkpoint_is_saved(start):
    with start(dispatch_window=1) as gate:
        run = Run.new(gate)
        train(run, 1)
        run.hold()
        run.backward(3)
        run.step(4)
        wait_until(lambda: run_of(run).dispatcher.under_way)
        answers = stop_soon(run)
        assert run.outcome(4).json()["type"] == "run_stopped"
        run.step(5)
        assert run.outcome(5).json()["error"].startswith("run_stopped: local has stopped the run")
        assert run.outcome(5).json()["category"] == "user"
        run.release()
        assert run.outcome(3).status_code == 200
        (answer,) = wait_until(lambda: answers)
        assert (answer["state"], answer["already"]) == ("ended", False)
        assert answer["checkpoint"] == f"tinker://{run.id}/weights/stopped-1"
        assert answer["checkpoint"] in answer["reason"]
        assert [kind for kind, _ in run.trainer.applied] == [
            "forward_backward",
            "optim_step",
            "forward_backward",
            "save",
        ]
        again = stop(run)
        assert again == answer | {"already": True}
        wait_until(lambda: not gate.placed())


def test_a_run_goes_on_from_the_checkpoint_of_its_stop(start):
    with start() as gate:
        run = Run.new(gate)
        train(run, 1, 2)
        path = stop(run)["checkpoint"]
        with gate.service() as service:
            training = service.create_training_client_from_state_with_optimizer(path).result()
            training.forward_backward([supervised([1, 9])], "cross_entropy")
            training.optim_step(types.AdamParams()).result()
            assert gate.trainer_of(training.model_id).step == 3


def test_nothing_is_saved_if_the_state_is_discarded(start):
    with start() as gate:
        run = Run.new(gate)
        train(run, 1)
        assert stop(run, discard=True)["checkpoint"] is None
        assert "save" not in [kind for kind, _ in run.trainer.applied]


def test_a_second_stop_that_discards_does_not_wait_for_the_save(start):
    with start() as gate:
        run = Run.new(gate)
        train(run, 1)
        run.hold()
        answers = stop_soon(run)
        save = wait_until(lambda: run_of(run).last_save)
        pins = gate.gateway.checkpoints.pins
        assert save.folder in gate.run(pins.folders)
        assert stop(run, discard=True)["already"]
        assert wait_until(lambda: answers)[0]["state"] == "ended"
        run.release()
        wait_until(lambda: save.folder not in gate.run(pins.folders))
        assert gate.retrieve(save.future.request_id).json()["type"] == "run_stopped"


def test_a_starting_run_ends_at_once_and_gives_its_place_back(start):
    with start() as gate:
        gate.run(gate.launcher.start_gate.clear)
        session = gate.session_id()
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny:full"}
        client = gate.http()
        created = client.post("/api/v1/create_model", json=body).json()["request_id"]
        run_id = f"{session}:train:0"
        answer = client.post(f"{OWN}/runs/{run_id}/stop", json={}).json()
        assert (answer["state"], answer["checkpoint"]) == ("ended", None)
        assert gate.retrieve(created).json()["type"] == "run_stopped"
        gate.run(gate.launcher.start_gate.set)
        wait_until(lambda: not gate.placed())


def test_a_run_without_a_place_ends_at_once(start):
    group = {"name": "one", "devices": ["cpu:0"], "roles": ["trainer", "sampler"], "workers": 1}
    groups = [group | {"awake": 0}]
    with start(groups=groups) as gate:
        run = Run(gate, gate.run_id(gate.session_id(), sampler="none"), "", None, gate.http())
        session = gate.session_id()
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny:full"}
        body["user_metadata"] = {"tandem.sampler": "none"}
        run.client.post("/api/v1/create_model", json=body)
        waiting = f"{session}:train:0"
        wait_until(lambda: gate.waiting_for_places() == [waiting])
        answer = run.client.post(f"{OWN}/runs/{waiting}/stop", json={}).json()
        assert answer["state"] == "ended"
        wait_until(lambda: gate.waiting_for_places() == [])


def test_a_dead_trainer_is_restored_and_then_saves(start):
    with start() as gate:
        run = Run.new(gate)
        train(run, 1, 2)
        gate.run(gate.launcher.start_gate.clear)
        run.die()
        answers = stop_soon(run)
        gate.run(gate.launcher.start_gate.set)
        (answer,) = wait_until(lambda: answers)
        assert answer["checkpoint"] == f"tinker://{run.id}/weights/stopped-2"
        assert run.newest.history == undisturbed(2)


def test_the_newest_snapshot_is_kept_if_the_trainer_cannot_save(start, no_wait):
    with start(recovery=OFTEN) as gate:
        run = Run.new(gate)
        train(run, 1)
        wait_until(lambda: run_of(run).log.newest.step == 1)
        gate.launcher.start_error["trainer"] = "no memory"
        run.die()
        wait_until(lambda: stop(run)["state"] == "ended")
        answer = stop(run)
        assert answer["checkpoint"] == f"tinker://{run.id}/weights/recovered-1"
        assert answer["checkpoint"] in answer["reason"]


def test_a_stop_while_the_storage_fails_is_told_so_and_saves_afterwards(start, monkeypatch):
    monkeypatch.setattr("gateway.runs.ending.REPEAT_AFTER", 0.01)
    with start() as gate:
        run = Run.new(gate)
        train(run, 1)
        gate.run(wait_for_no_lock(gate.gateway.database))
        with locked_database(gate.settings.data_dir):
            refused = run.client.post(f"{OWN}/runs/{run.id}/stop", json={})
            assert (refused.status_code, refused.json()["type"]) == (503, "storage_failed")
            assert "is ending" in refused.json()["error"]
        wait_until(lambda: run_of(run).error)
        wait_until(lambda: gate.run(gate.gateway.database.flush()))
        answer = stop(run)
        assert answer["checkpoint"] == f"tinker://{run.id}/weights/stopped-1"


def test_a_checkpoint_that_the_database_refuses_is_recorded_later(start, monkeypatch):
    monkeypatch.setattr("gateway.runs.ending.REPEAT_AFTER", 0.01)
    with start() as gate:
        run = Run.new(gate)
        train(run, 1)
        tries = fail_first_rows(gate, monkeypatch, [StorageFailed("it is away")] * 2)
        wait_until(lambda: stop(run)["state"] == "ended")
        assert stop(run)["checkpoint"] == f"tinker://{run.id}/weights/stopped-1"
        assert len(tries) == 3
        assert [kind for kind, _ in run.trainer.applied].count("save") == 1


def test_the_newest_snapshot_is_kept_after_a_fault_of_the_gateway(start, monkeypatch):
    with start(recovery=OFTEN) as gate:
        run = Run.new(gate)
        train(run, 1)
        wait_until(lambda: run_of(run).log.newest.step == 1)
        fail_first_rows(gate, monkeypatch, [ValueError("a bug")])
        wait_until(lambda: stop(run)["state"] == "ended")
        answer = stop(run)
        assert answer["checkpoint"] == f"tinker://{run.id}/weights/stopped-1"
        assert "because ValueError in the gateway" in answer["reason"]


def test_the_next_gateway_saves_if_this_one_ends_before_the_snapshot_is_kept(start, monkeypatch):
    with start(recovery=OFTEN) as gate:
        run = Run.new(gate)
        train(run, 1)
        wait_until(lambda: run_of(run).log.newest.step == 1)
        fail_first_rows(gate, monkeypatch, [ValueError("a bug")])
        keeping = threading.Event()

        async def keep(*_about, **_more) -> None:
            keeping.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(gate.gateway.runs.tools.snapshots, "keep", keep)
        stop_soon(run)
        assert keeping.wait(30)
    with start(recovery=OFTEN) as gate:
        row = wait_until(lambda: ended(gate, run.id))
        assert row["reason"].endswith(f"its state is tinker://{run.id}/weights/stopped-1")


def fail_first_rows(gate, monkeypatch, failures: list[Exception]) -> list[str]:
    """Let the first checkpoints' rows fail. Returns the tries."""
    put, left, tries = gate.gateway.checkpoints.put, iter(failures), []

    async def failing(checkpoint) -> None:
        tries.append(str(checkpoint.path))
        if failure := next(left, None):
            raise failure
        await put(checkpoint)

    monkeypatch.setattr(gate.gateway.checkpoints, "put", failing)
    return tries


def test_a_name_that_is_taken_gets_a_suffix(start):
    with start() as gate:
        run = Run.new(gate)
        train(run, 1)
        save(run, 3, "stopped-1")
        assert f"{run.id}/weights/stopped-1-" in stop(run)["checkpoint"]


def test_runs_of_a_shared_trainer_are_stopped_one_by_one(start):
    with start() as gate:
        runs = [Run.new(gate, rank=8) for _ in range(2)]
        for run in runs:
            train(run, 1)
        stop(runs[0])
        train(runs[1], 2)
        assert runs[1].state.history == undisturbed(2)
        wait_until(lambda: runs[0].id not in runs[1].newest.runs)


@pytest.mark.parametrize("discard", [False, True])
def test_the_next_gateway_completes_a_stop(start, discard):
    with start(dispatch_window=1) as gate:
        run = Run.new(gate)
        train(run, 1, 2)
        run.hold()
        run.backward(5)
        run.step(6)
        wait_until(lambda: run_of(run).dispatcher.under_way)
        stop_soon(run, discard=discard)
        gate.run(gate.gateway.database.flush())
    with start() as gate:
        client = gate.http()
        row = wait_until(lambda: ended(gate, run.id))
        path = f"tinker://{run.id}/weights/stopped-2"
        assert ("stopped the run" in row["reason"], path in row["reason"]) == (True, not discard)
        assert gate.retrieve(f"{run.id}:6").json()["type"] == "run_stopped"
        body = {"model_id": run.id, "seq_id": 7, "adam_params": {}}
        client.post("/api/v1/optim_step", json=body)
        assert gate.retrieve(f"{run.id}:7").json()["type"] == "run_stopped"
        wait_until(lambda: not gate.placed())
    with start() as gate:
        body = {"model_id": run.id, "seq_id": 8, "adam_params": {}}
        gate.http().post("/api/v1/optim_step", json=body)
        assert gate.retrieve(f"{run.id}:8").json()["type"] == "run_stopped"


def test_the_end_of_the_session_waits_for_the_save(start):
    with start() as gate:
        run = Run.new(gate)
        train(run, 1)
        run.hold()
        answers = stop_soon(run)
        wait_until(lambda: run_of(run).last_save is not None)
        finish = {"reason": {"type": "success"}}
        finishing = threading.Thread(
            target=lambda: gate.http().post(
                f"/api/v1/sessions/{run.session_id}/finish", json=finish
            )
        )
        finishing.start()
        run.release()
        finishing.join()
        (answer,) = wait_until(lambda: answers)
        assert answer["checkpoint"] == f"tinker://{run.id}/weights/stopped-1"
        assert ended(gate, run.id)


def test_a_session_whose_run_saves_delays_no_end_of_another(start, monkeypatch):
    monkeypatch.setattr("gateway.core._PATIENCE", 3600.0)
    with start() as gate:
        run, sessions = Run.new(gate), gate.gateway.sessions
        train(run, 1)
        run.hold()
        stop_soon(run)
        wait_until(lambda: run_of(run).last_save is not None)
        sessions.get(run.session_id).seen_at -= 601
        (end,) = wait_until(lambda: list(gate.gateway._ending.values()))
        other = gate.session_id()
        sessions.get(other).seen_at -= 601
        wait_until(lambda: sessions.get(other) is None)
        assert gate.gateway._ending[run.session_id] is end
        run.release()
        wait_until(lambda: sessions.get(run.session_id) is None)
        assert "/weights/stopped-1" in ended(gate, run.id)["reason"]


def test_the_sdk_raises_the_typed_error_at_once(start):
    with start() as gate, gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        training.forward_backward([supervised([1, 9])], "cross_entropy").result()
        run = Run(gate, training.model_id, "", None, gate.http())
        stop(run)
        began = time.monotonic()
        with pytest.raises(tinker.RequestFailedError, match="run_stopped") as raised:
            training.optim_step(types.AdamParams()).result()
        assert raised.value.category is types.RequestErrorCategory.User
        assert time.monotonic() - began < 20, "the SDK repeated it"


def test_a_stop_is_in_the_audit_log_and_readers_may_not(start):
    with start() as gate:
        run = Run.new(gate)
        create = gate.gateway.keys.create
        reader = gate.run(create(NewKey(owner="local", role="reader")))[1]
        refused = gate.http(reader).post(f"{OWN}/runs/{run.id}/stop", json={})
        assert refused.status_code == 403
        stop(run, discard=True)
        found = [(each["event"], each["event_details"]) for each in audit_log(gate.http())]
        stops = [details for event, details in found if event == "run_stop"]
        assert [details["status"] for details in stops] == [403, 200]
        assert (stops[1]["target"], stops[1]["discard"]) == (run.id, "true")


def test_the_body_takes_only_a_flag(start):
    with start() as gate:
        run = Run.new(gate)
        for wrong in ("yes", 1, None):
            answer = run.client.post(f"{OWN}/runs/{run.id}/stop", json={"discard": wrong})
            assert answer.status_code == 400


def test_a_run_ends_at_its_deadline_with_a_checkpoint(start):
    with start() as gate:
        run = Run.new(gate)
        train(run, 1)
        gate.run(lambda: setattr(run_of(run), "deadline", time.time()))
        row = wait_until(lambda: ended(gate, run.id))
        assert row["reason"].startswith("the run has reached its tandem.deadline")
        assert f"tinker://{run.id}/weights/stopped-1" in row["reason"]
        run.step(3)
        assert run.outcome(3).json()["type"] == "deadline_exceeded"


def test_a_deadline_that_passes_while_no_gateway_runs_counts_at_the_next_start(start):
    with start() as gate:
        run_id = gate.run_id(gate.session_id(), deadline="2")
        run = Run(gate, run_id, "", gate.trainer_of(run_id), gate.http())
        train(run, 1)
        deadline = run_of(run).deadline
        assert deadline is not None
    wait_until(lambda: time.time() > deadline)
    with start() as gate:
        row = wait_until(lambda: ended(gate, run_id))
        assert f"tinker://{run_id}/weights/stopped-1" in row["reason"]


def test_a_deadline_in_the_past_is_refused(start):
    with start() as gate:
        body = {"session_id": gate.session_id(), "model_seq_id": 0, "base_model": "tiny:full"}
        body["user_metadata"] = {"tandem.deadline": "2020-01-01T00:00:00Z"}
        answer = gate.http().post("/api/v1/create_model", json=body)
        assert answer.status_code == 400
        assert "which has passed; choose a later one" in answer.json()["error"]


def test_only_the_newest_states_of_a_run_are_kept(start):
    with start() as gate:
        run_id = gate.run_id(gate.session_id(), keep_states="2")
        run = Run(gate, run_id, "", gate.trainer_of(run_id), gate.http())
        train(run, 1)
        public = save(run, 3, "public")
        path = f"/api/v1/training_runs/{run_id}/checkpoints/weights/public/publish"
        assert run.client.post(path).status_code == 204
        loaded = save(run, 4, "loaded")
        checkpoints = gate.gateway.checkpoints
        reading = checkpoints.reading(loaded, readers=None)
        gate.run(reading.__aenter__())
        for seq_id, name in enumerate(("a", "b", "c", "d"), start=5):
            save(run, seq_id, name)
        wanted = {public, loaded, *(f"tinker://{run_id}/weights/{name}" for name in "cd")}
        assert _states(run) == wanted
        gate.run(reading.__aexit__(None, None, None))
        stop(run)
        assert _states(run) == {
            public,
            *(f"tinker://{run_id}/weights/{n}" for n in ("d", "stopped-1")),
        }


def test_a_state_stays_until_a_new_run_has_loaded_it(start):
    with start() as gate:
        run_id = gate.run_id(gate.session_id(), keep_states="1")
        run = Run(gate, run_id, "", gate.trainer_of(run_id), gate.http())
        loaded = save(run, 1, "a")
        gate.run(gate.launcher.start_gate.clear)
        body = {"session_id": gate.session_id(), "model_seq_id": 0, "path": loaded}
        answer = run.client.post("/api/v1/load_weights", json=body | {"optimizer": True})
        created = answer.json()["request_id"]
        kept = save(run, 2, "b")
        assert _states(run) == {loaded, kept}
    with start() as gate:
        run = Run(gate, run_id, "", None, gate.http())
        kept = save(run, 3, "c")
        assert _states(run) == {loaded, kept}
        assert gate.retrieve(created).json()["type"] == "load_weights"


def _states(run: Run) -> set[str]:
    found = run.client.get(f"/api/v1/training_runs/{run.id}/checkpoints").json()["checkpoints"]
    return {checkpoint["tinker_path"] for checkpoint in found}


def test_a_sleeping_trainer_is_woken_to_save(start):
    groups = [{"name": "one", "devices": ["cpu:0"], "roles": ["trainer", "sampler"]}]
    with start(groups=groups) as gate:
        runs = []
        for number in (1, 2):
            run_id = gate.run_id(gate.session_id(), sampler="none")
            run = Run(gate, run_id, "", gate.trainer_of(run_id), gate.http())
            train(run, *range(1, number + 1))
            runs.append(run)
        sleeper = runs[0]
        wait_until(lambda: sleeper.trainer.asleep)
        wait_until(lambda: stop(sleeper)["state"] == "ended")
        assert stop(sleeper)["checkpoint"] == f"tinker://{sleeper.id}/weights/stopped-1"
        train(runs[1], 3)


def test_a_run_ends_without_a_checkpoint_if_its_owner_has_no_room_for_one(start):
    with start(limit={"checkpoint_bytes": 50}) as gate:
        run = Run.new(gate)
        train(run, 1)
        answer = stop(run)
        assert (answer["state"], answer["checkpoint"]) == ("ended", None)
        assert (
            "no checkpoint was saved at its end: the limit of checkpoint bytes" in answer["reason"]
        )


def test_runs_that_are_ending_are_found_by_that_state(start):
    with start(dispatch_window=1) as gate:
        run = Run.new(gate)
        run.hold()
        run.backward(1)
        wait_until(lambda: run_of(run).dispatcher.under_way)
        answers = stop_soon(run)
        found = run.client.get(f"{OWN}/runs?state=ending").json()["runs"]
        assert [(row["id"], row["reason"]) for row in found] == [
            (run.id, "local has stopped the run")
        ]
        run.release()
        wait_until(lambda: answers)
        assert run.client.get(f"{OWN}/runs?state=ending").json()["runs"] == []
