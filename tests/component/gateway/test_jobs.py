"""Jobs of other frameworks, with a fake launcher. Tests write the files of the program."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gateway.jobs.preflight import REPEATS
from tandem.agent.host import Accelerator
from tandem.agent.preflight import PreflightCheck
from tandem.backends.jobs import STOPPED
from tandem.errors import InvalidField, JobFailed, WorkerStartFailed
from tests.support.gateway.fake_launcher import HOST, FakeLauncher
from tests.support.gateway.submitted_jobs import OWN, ROW, Submitted, body, is_gone
from tests.support.waiting import wait_until


@pytest.fixture
def start(start, no_wait, monkeypatch):
    monkeypatch.setattr("gateway.jobs.life._POLL", 0.1)
    monkeypatch.setattr("gateway.jobs.life._METERED", 0.2)
    return start


def test_a_job_runs_records_its_metrics_and_leaves_a_checkpoint(start):
    with start() as gate:
        job = Submitted(gate)
        assert job.run()["framework"] == "trl"
        assert job.run()["name"] == "sums"
        spec = job.process()
        assert spec.job.processes == 2
        assert spec.job.folder == str(job.folder)
        asked = json.loads((job.folder / "job.json").read_text())
        assert (asked["attempt"], asked["processes"], asked["configuration"]["steps"]) == (1, 2, 4)
        job.log(1, 2)
        wait_until(lambda: job.curve()["step"] == [1, 2])
        assert job.about()["state"] == "running"
        wait_until(lambda: (job.about()["progress"] or {}).get("percent") == 50)
        job.log(3, 4)
        job.write_result()
        job.exit(0)
        about = job.ended()
        assert about["reason"] == "the job has finished"
        assert about["result"] == {
            "weights": f"tinker://{job.id}/weights/final",
            "sampler_weights": f"tinker://{job.id}/sampler_weights/final",
        }
        assert job.curve()["step"] == [1, 2, 3, 4]
        assert is_gone(job)
        listed = job.client.get(f"{OWN}/jobs").json()
        assert [each["id"] for each in listed["jobs"]] == [job.id]
        found = job.client.get("/api/v1/training_runs").json()["training_runs"][0]
        assert found["last_checkpoint"]["tinker_path"] == f"tinker://{job.id}/weights/final"
        assert not found["corrupted"]


def test_a_program_may_write_odd_lines_about_its_ranks(start):
    with start() as gate:
        job = Submitted(gate)
        job.process()
        world = job.folder / "attempt-1" / "world.jsonl"
        for text, shown in (
            ('{"rank": 0}\n[1]\n"x"\n', [{"rank": 0}]),
            ('{"rank": NaN}\n', [{"rank": None}]),
            ("no JSON\n", []),
            ("[" * 10_000 + "\n", []),
        ):
            world.write_text(text)
            assert job.about()["world"] == shown


def test_a_failed_attempt_is_repeated_and_then_the_job_fails_with_the_reason(start):
    with start() as gate:
        job = Submitted(gate, max_restarts=1)
        job.exit(1, reason="rank 1 ended")
        job.process(2)
        job.exit(1, attempt=2, reason="rank 0 ended")
        about = job.ended()
        assert (about["attempt"], about["restarts"], about["result"]) == (2, 1, None)
        assert "the job failed after 2 attempts: rank 0 ended" in about["reason"]
        assert is_gone(job)


def test_a_killed_worker_is_a_failed_attempt(start):
    with start() as gate:
        job = Submitted(gate, max_restarts=1)
        job.exit(None)
        job.write_result()
        job.exit(0, attempt=2)
        assert job.ended()["reason"] == "the job has finished"


def test_a_requested_end_of_an_attempt_is_no_failure(start):
    with start() as gate:
        job = Submitted(gate)
        job.exit(STOPPED)
        job.write_result()
        job.exit(0, attempt=2)
        about = job.ended()
        assert (about["reason"], about["restarts"]) == ("the job has finished", 0)


def test_a_damaged_result_ends_the_job_and_its_files_stay(start):
    with start() as gate:
        job = Submitted(gate)
        job.process()
        (job.folder / "result").mkdir()
        job.exit(0)
        about = job.ended()
        assert "the result of the job is damaged" in about["reason"]
        assert about["files_until"]
        assert (job.folder / "data/train.jsonl").exists()
        gate.run(gate.gateway.database.write(_expired()))
        gate.run(gate.gateway.jobs.remove_old_files())
        assert not job.folder.exists()


def _expired():
    from sqlalchemy import update

    from gateway.storage.tables import jobs

    return update(jobs).values(files_until=1.0)


def test_a_job_ends_its_attempt_on_a_drained_group_and_continues_on_another_one(start):
    roles = ["trainer", "sampler"]
    groups = [{"name": f"g{n}", "devices": [f"cpu:{n}"], "roles": roles} for n in range(2)]
    with start(groups=groups) as gate:
        job = Submitted(gate, processes=1, max_restarts=1)
        first = job.process().group
        job.client.post(f"{OWN}/groups/{first}/drain").raise_for_status()
        wait_until(lambda: job.about()["state"] == "running")
        assert gate.placed() == {job.id: first}
        job.exit(1, reason="rank 0 ended")
        second = job.process(2).group
        assert {first, second} == {"g0", "g1"}
        assert gate.placed() == {job.id: second}
        job.write_result()
        job.exit(0, attempt=2)
        assert job.ended()["reason"] == "the job has finished"
        assert is_gone(job)


def test_a_job_between_two_attempts_waits_while_its_only_group_is_drained(start):
    with start() as gate:
        job = Submitted(gate, max_restarts=1)
        job.process()
        job.client.post(f"{OWN}/groups/cpu/drain").raise_for_status()
        job.exit(1)
        wait_until(lambda: job.about()["queue_position"] == 1)
        assert "group cpu is drained, and takes no more workers" in job.about()["reason"]
        assert gate.placed() == {}
        job.client.delete(f"{OWN}/groups/cpu/drain").raise_for_status()
        job.exit(STOPPED, attempt=2)
        job.client.post(f"{OWN}/runs/{job.id}/stop", json={}).raise_for_status()
        job.ended()
        assert is_gone(job)


@pytest.mark.parametrize("state", ["queued", "running"])
def test_a_stopped_job_leaves_nothing(start, state):
    with start() as gate:
        if state == "queued":
            gate.launcher.start_gate.clear()
        job = Submitted(gate)
        job.process()
        wait_until(lambda: job.about()["state"] == state)
        answer = job.client.post(f"{OWN}/runs/{job.id}/stop", json={})
        gate.run(gate.launcher.start_gate.set)
        assert answer.status_code == 200, answer.text
        assert "has stopped the run" in job.ended()["reason"]
        assert is_gone(job)


def test_the_end_of_its_session_ends_a_job(start):
    with start() as gate:
        job = Submitted(gate)
        job.process()
        session_id = job.id.partition(":")[0]
        end = partial(gate.gateway.end_session, session_id=session_id, state="finished")
        gate.run(end(reason="success", detail=""))
        assert job.ended()["state"] == "ended"
        assert is_gone(job)


def test_a_job_ends_at_its_deadline(start):
    with start() as gate:
        job = Submitted(gate, deadline="3600")
        live = gate.run(lambda: gate.gateway.jobs.find_job(job.id))
        live.plan = live.plan.model_copy(update={"deadline": 1.0})
        assert "the job has reached its deadline" in job.ended()["reason"]


def test_the_next_gateway_reads_on_and_writes_each_line_once(start):
    with start() as gate:
        job = Submitted(gate)
        job.process()
        job.log(1, 2)
        wait_until(lambda: job.curve()["step"] == [1, 2])
    job.log(3)
    with start() as gate:  # the fake launcher's processes ended with its gateway
        job.continued_by(gate)
        job.process(2)
        job.log(4, attempt=2)
        job.write_result()
        job.exit(0, attempt=2)
        about = job.ended()
        assert (about["reason"], about["restarts"]) == ("the job has finished", 0)
        assert job.curve()["step"] == [1, 2, 3, 4]
        index = gate.run(gate.gateway.record.summaries([job.id]))[job.id]
        assert index.rows == 4


# --- Turns ----------------------------------------------------------------------------------------

_GPU = Accelerator(index=0, uuid="GPU-0", name="an NVIDIA device", memory_bytes=8 * 2**30)


@pytest.fixture
def one_gpu(start):
    """A gateway with one device, whose host can suspend a process."""
    host = replace(HOST, accelerators=(_GPU,), no_suspender="")
    group = {"name": "gpu", "devices": ["cuda:0"], "roles": ["trainer", "sampler"]}
    sharing = {"quantum": 0.1}
    with start(launcher=FakeLauncher(host=host), groups=[group], sharing=sharing) as gate:
        yield gate


def moves_of(gate, job: Submitted) -> list[str]:
    session_id = job.id.partition(":")[0]
    return [move for move, name, _ in gate.launcher.suspended if session_id in name]


def test_two_jobs_of_one_process_take_turns_on_a_device_and_both_finish(one_gpu):
    model = Path(one_gpu.run(lambda: one_gpu.gateway.models.get("tiny").path))
    save_file({"model.norm.weight": np.ones((2, 3), np.float32)}, model / "model.safetensors")
    first = Submitted(one_gpu, processes=1)
    specs = wait_until(lambda: one_gpu.launcher.specs)
    second = Submitted(one_gpu, processes=1)
    wait_until(lambda: moves_of(one_gpu, first) and moves_of(one_gpu, second))
    wait_until(lambda: first.about()["state"] == "queued")
    wait_until(lambda: first.about()["state"] == "running")
    for job, spec in zip((first, second), specs, strict=True):
        (job.folder / "attempt-1").mkdir()
        job.log(1, 2, 3, 4)
        wait_until(lambda job=job: job.curve()["step"] == [1, 2, 3, 4])
        (job.folder / "result").mkdir()
        save_file(
            {"model.norm.weight": np.ones((2, 3), np.float32)},
            job.folder / "result/model.safetensors",
        )
        (job.folder / "attempt-1/end.json").write_text('{"status": 0, "reason": ""}')
        wait_until(lambda job=job: job.about()["state"] == "running")
        one_gpu.run(one_gpu.launcher.kill(spec.worker_id, "it ended"))
        about = job.ended_alone()
        assert (about["reason"], about["attempt"]) == ("the job has finished", 1)
    assert len(specs) == 2 and not one_gpu.launcher.stopped


def suspended(gate) -> tuple[Submitted, Submitted]:
    """Return a suspended job, and the job that keeps the device. The latter cannot be suspended."""
    job = Submitted(gate, processes=1)
    process = wait_until(lambda: gate.launcher.specs)[0].worker_id
    other = Submitted(gate, processes=1)
    roster = gate.gateway.supervisor.roster
    gate.run(lambda: roster.calls_of(other.id)).keeps_devices = True
    wait_until(lambda: gate.run(lambda: roster.rows[job.id].state) == "asleep")
    wait_until(lambda: other.about()["state"] == "running")
    assert process in gate.launcher.serving
    return job, other


def test_a_suspended_job_waits_in_the_queue_and_says_why(one_gpu):
    job, _other = suspended(one_gpu)
    about = wait_until(lambda: (found := job.about())["queue_position"] and found)
    assert (about["state"], about["queue_position"]) == ("queued", 1)
    assert "holds devices of group gpu until it ends: an attempt of it" in about["reason"]


def test_a_suspended_job_that_is_stopped_leaves_nothing(one_gpu):
    job, other = suspended(one_gpu)
    job.client.post(f"{OWN}/runs/{job.id}/stop", json={}).raise_for_status()
    assert "has stopped the run" in job.ended_alone()["reason"]
    assert is_gone(job)
    assert other.about()["state"] == "running"


def test_a_suspended_job_ends_at_its_deadline(one_gpu):
    job, _other = suspended(one_gpu)
    live = one_gpu.run(lambda: one_gpu.gateway.jobs.find_job(job.id))
    live.plan = live.plan.model_copy(update={"deadline": 1.0})
    assert "the job has reached its deadline" in job.ended_alone()["reason"]
    assert is_gone(job)


def test_a_suspended_job_whose_process_dies_did_not_fail_and_then_keeps_its_devices(one_gpu):
    job, other = suspended(one_gpu)
    (process,) = {name for move, name, _ in one_gpu.launcher.suspended if move == "suspend"}
    one_gpu.run(one_gpu.launcher.kill(process, "the job was killed by SIGKILL"))
    wait_until(lambda: job.about()["attempt"] == 2)
    assert job.about()["restarts"] == 0
    other.client.post(f"{OWN}/runs/{other.id}/stop", json={}).raise_for_status()
    wait_until(lambda: job.about()["state"] == "running")
    calls = one_gpu.run(lambda: one_gpu.gateway.supervisor.roster.calls_of(job.id))
    assert calls.keeps_devices


def test_a_job_that_could_not_be_suspended_starts_again_and_keeps_its_devices(one_gpu):
    one_gpu.launcher.suspend_error = "not supported"
    job = Submitted(one_gpu, processes=1)
    wait_until(lambda: one_gpu.launcher.specs)
    other = Submitted(one_gpu, processes=1)
    wait_until(lambda: job.about()["attempt"] == 2)
    assert job.about()["restarts"] == 0
    wait_until(lambda: other.about()["attempt"] == 2)
    said = "an attempt of it has ended while it was suspended"
    wait_until(lambda: any(said in each.about()["reason"] for each in (job, other)))


MISSING = (PreflightCheck("trl", "not installed", "install trl 1.16", "package_missing"),)


def test_a_job_waits_with_the_fault_of_its_preflight_and_without_a_place(start):
    with start() as gate:
        gate.launcher.checks = MISSING
        job = Submitted(gate)
        reason = "(10 package_missing): trl: not installed: install trl 1.16"
        wait_until(lambda: reason in job.about()["reason"])
        assert (gate.placed(), gate.launcher.specs) == ({}, [])
        (needs,) = gate.launcher.preflights
        assert (needs.framework, needs.folder, needs.devices) == ("trl", str(job.folder), 0)
        assert needs.packages["trl"] == "1.16"


def test_a_job_starts_when_its_fault_is_repaired(start, monkeypatch):
    monkeypatch.setattr("gateway.jobs.preflight.PAUSE_SECONDS", 0.05)
    monkeypatch.setattr("gateway.jobs.preflight.REPEATS", 10**6)
    with start() as gate:
        gate.launcher.checks = MISSING
        job = Submitted(gate)
        wait_until(lambda: len(gate.launcher.preflights) > 1)
        gate.launcher.checks = ()
        job.process()
        wait_until(lambda: job.about()["state"] == "running")


def test_a_job_whose_fault_stays_ends_with_it_and_never_had_a_place(start, monkeypatch):
    monkeypatch.setattr("gateway.jobs.preflight.PAUSE_SECONDS", 0.0)
    with start() as gate:
        gate.launcher.checks = MISSING
        about = Submitted(gate).ended()
        assert "the job cannot start (10 package_missing)" in about["reason"]
        assert (len(gate.launcher.preflights), gate.launcher.specs) == (1 + REPEATS, [])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"backend": "torchtune"}, "torchtune is no trainer backend"),
        ({"backend": "torchtune-sft"}, "torchtune is no trainer backend"),
        ({"backend": "fsdp2"}, "is no job backend"),
        ({"configuration": {"method": "sft", "learning_rate": -1}}, "learning_rate"),
        ({"configuration": {"method": "sft", "learning_rat": 1}}, "did you mean learning_rate?"),
        (
            {"configuration": {"method": "sft", "x": 1}},
            "'x' is no setting of trl; `tandem",
        ),
        ({"model": "huge"}, "unknown model 'huge'"),
        ({"data": {"train": ""}}, "data.train is empty"),
        ({"data": {"train": f"{ROW}\n{{"}}, "data.train: line 2 is not JSON"),
        ({"data": {"train": f'{ROW}\n{{"text": "x"}}'}}, "line 2 lacks a column: rows of sft have"),
        ({"data": {"train": ROW, "eval": "[]"}}, "data.eval: line 1 is not a JSON object"),
        ({"processes": 99}, "no group suits it: none has devices for 99 ranks"),
        ({"host_memory": "much"}, "tandem.host_memory is 'much'"),
        ({"deadline": "soon"}, "tandem.deadline is 'soon'"),
        ({"deadline": "2020-01-01T00:00:00Z"}, "has passed"),
    ],
)
def test_a_faulty_job_is_refused_and_leaves_no_file(gate, changes, sentence):
    with gate.http() as client:
        answer = client.post(f"{OWN}/jobs", json=body(**changes))
    assert answer.status_code in (400, 404)
    assert sentence in answer.json()["error"]
    assert not list(gate.settings.data_dir.glob("jobs/*"))


def test_the_commands_submit_list_show_and_stop_a_job(gate, tandem, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{ROW}\n")
    settings = ("--set", "learning_rate=1e-4", "--set", "schedule=cosine")
    given = ("--model", "tiny", "--data", rows, "--processes", 2, "--name", "by-command")
    memory = ("--host-memory", "2GiB")
    job = json.loads(tandem("train", "trl-sft", *given, *settings, *memory, "--json"))
    assert wait_until(lambda: gate.launcher.specs)[0].host_memory == 2 * 2**30
    assert (job["backend"], job["framework"], job["name"]) == ("trl", "trl", "by-command")
    chosen = {name: job["configuration"][name] for name in ("method", "learning_rate", "schedule")}
    assert chosen == {"method": "sft", "learning_rate": 1e-4, "schedule": "cosine"}
    assert job["id"] in tandem("jobs")
    assert "2 processes" in tandem("jobs", "by-command")
    assert "trl" in tandem("runs", "list")
    with pytest.raises(InvalidField, match="'speed' is no setting of trl"):
        tandem("train", "trl-sft", *given, "--set", "speed=2")
    with pytest.raises(InvalidField, match="torchtune is no trainer backend"):
        tandem("train", "torchtune", *given)
    assert "has stopped the run" in tandem("runs", "stop", "by-command")


def test_a_job_that_waits_for_an_absent_agent_says_so_and_for_how_long(gate, tandem, monkeypatch):
    async def absent(needs, *, timeout):
        raise WorkerStartFailed("no agent answers at host-1:7400")

    monkeypatch.setattr(gate.launcher, "preflight", absent)
    job = Submitted(gate, name="lonely")
    wait_until(lambda: "no agent answers" in job.about()["reason"])
    wait_until(lambda: job.about()["waited_seconds"] > 0)
    shown = tandem("jobs", "lonely")
    assert "queued for 0." in shown and "no agent answers at host-1:7400" in shown
    page = job.client.get(f"/runs/{job.id}").text
    assert "no agent answers at host-1:7400 (since " in page
    job.client.post(f"{OWN}/runs/{job.id}/stop", json={}).raise_for_status()
    job.ended()


def test_the_pages_show_a_job_with_its_framework_and_why_it_waits(start):
    with start() as gate:
        gate.launcher.start_gate.clear()
        gate.launcher.waits_for = "it is number 2 of the cluster"
        job = Submitted(gate)
        job.process()
        wait_until(lambda: job.about()["reason"])
        for page in ("/", f"/runs/{job.id}"):
            shown = job.client.get(page).text
            assert "· trl" in shown
            assert "queued" in shown
        gate.run(gate.launcher.start_gate.set)


def test_jobs_count_toward_the_limit_of_runs_and_the_budget(start):
    with start(limit={"runs": 1}) as gate:
        job = Submitted(gate)
        answer = job.client.post(f"{OWN}/jobs", json=body())
        assert (answer.status_code, answer.json()["type"]) == (403, "limit_exceeded")
        model = {"session_id": gate.session_id(), "model_seq_id": 0, "base_model": "tiny:full"}
        answer = job.client.post("/api/v1/create_model", json=model)
        assert (answer.status_code, answer.json()["type"]) == (403, "limit_exceeded")
        job.process()
        wait_until(lambda: job.about()["state"] == "running")
        owner = job.about()["owner"]
        budget = {"device_hours": 1e-9}
        job.client.patch(f"{OWN}/owners/{owner}", json=budget).raise_for_status()
        assert "the budget of local is used up" in job.ended()["reason"]
        assert is_gone(job)


def test_a_followed_job_prints_its_steps_and_its_result(gate, tandem, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{ROW}\n")
    given = ("trl-sft", "--model", "tiny", "--data", rows, "--follow", "--name")

    def carry_out(status: int) -> None:
        found = wait_until(lambda: gate.run(gate.gateway.jobs.all))
        job = Submitted(gate, found[0].run_id)
        wait_until(lambda: any(s.run_id == job.id for s in gate.launcher.specs))
        gate.launcher.specs[:] = [s for s in gate.launcher.specs if s.run_id == job.id]
        job.process()
        job.log(1, 2)
        job.write_result()
        job.exit(status, reason="rank 0 ended")

    with ThreadPoolExecutor() as threads:
        done = threads.submit(carry_out, 0)
        shown = tandem("train", *given, "followed")
        done.result()
        assert "step 2  tandem/loss 0.5" in shown
        assert "/sampler_weights/final" in shown
        done = threads.submit(carry_out, 1)
        with pytest.raises(JobFailed, match="rank 0 ended"):
            tandem("train", *given, "failing")
        done.result()
