"""Requests for jobs that are malformed, too large, refused or of others, and full disks."""

from __future__ import annotations

import errno
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.gateway.submitted_jobs import OWN, ROW, Submitted, body
from tests.support.unreliable_disk import Fault, UnreliableDisk
from tests.support.waiting import wait_until


@pytest.fixture
def start(start, no_wait, monkeypatch):
    monkeypatch.setattr("gateway.jobs.life._POLL", 0.1)
    monkeypatch.setattr("gateway.jobs.life._METERED", 0.2)
    return start


def data(row: str) -> dict:
    return {"data": {"train": row}}


# --- Malformed requests -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": "n" * 201}, "the run's name has 201 characters"),
        ({"tags": ["t"] * 51 + [str(n) for n in range(51)]}, "tags, 50 at most"),
        ({"processes": 0}, "processes"),
        ({"processes": True}, "processes"),
        ({"processes": 10**30}, "processes"),
        ({"ttl_seconds": -1}, "ttl_seconds"),
        ({"priority": 11}, "priority"),
        ({"backend": "x" * 65}, "backend"),
        ({"group": "nowhere"}, "nowhere"),
        ({"model": ["tiny"]}, "model"),
        ({"data": {"train": [ROW]}}, "data.train"),
        ({"data": [ROW]}, "data"),
        ({"configuration": "sft"}, "configuration"),
        ({"configuration": {}}, "method"),
        ({"configuration": {"method": ["sft"]}}, "method"),
        ({"configuration": {"method": "sft", "steps": 10**40}}, "steps"),
        ({"configuration": {"method": "sft", "learning_rate": 1e400}}, "learning_rate"),
        ({"configuration": {"method": "sft", "lora_rank": {"a": {"b": []}}}}, "lora_rank"),
        (data('{"prompt": "a", "completion": NaN}'), "line 1 is not JSON"),
        (data('{"prompt": "a", "completion": "\\ud800"}'), "line 1 is not JSON"),
        (data('{"prompt": "a", "completion": ' + "[" * 5000), "line 1 is not JSON"),
        (data('{"messages": [{"role": "user"}]}'), "has a wrong messages"),
        (data('{"messages": []}'), "has a wrong messages"),
        (data('{"prompt": null, "completion": "b"}'), "has a wrong prompt"),
        (data(f'{ROW}\n{{"messages": [{{"role": "user", "content": "c"}}]}}'), "other columns"),
        (data("\n \n"), "line 1 is not JSON"),
    ],
)
def test_a_malformed_job_is_refused_by_the_name_of_its_fault(gate, changes, sentence):
    with gate.http() as client:
        content = json.dumps(body(**changes)).encode()
        answer = client.post(f"{OWN}/jobs", content=content)
    assert answer.status_code == 400, answer.text
    assert sentence in answer.json()["error"]
    assert not list(gate.settings.data_dir.glob("jobs/*"))


@pytest.mark.parametrize("part", ['"\\ud800"', "[" * 5000, "1" * 5000, '"\xff"', ""])
def test_a_body_that_is_no_json_is_refused(gate, part):
    with gate.http() as client:
        content = b'{"backend": "trl", "configuration": %s' % part.encode("latin-1")
        answer = client.post(f"{OWN}/jobs", content=content)
    assert answer.status_code == 400, answer.text


def test_a_name_and_tags_are_kept_as_those_of_runs(start):
    with start() as gate:
        job = Submitted(gate, name="a\0b", tags=[" c ", "c", "d"])
        assert job.about()["tags"] == job.run()["tags"] == ["c", "d"]
        assert job.about()["name"].startswith("a")


def test_many_rows_with_many_commas_and_brackets_are_taken(start):
    row = json.dumps({"prompt": '"[1, 2]" and \\', "completion": "3, {4}, 5"})
    with start() as gate:
        job = Submitted(gate, **data(f"{row}\n" * 70_000))
        assert (job.folder / "data/train.jsonl").read_text() == f"{row}\n" * 70_000


def test_many_values_beside_the_data_are_refused(gate):
    with gate.http() as client:
        configuration = {"method": "sft", "x": [0] * 70_000}
        answer = client.post(f"{OWN}/jobs", json=body(configuration=configuration))
    assert (answer.status_code, answer.json()["type"]) == (413, "payload_too_large")


# --- Limits -----------------------------------------------------------------------------------


def test_simultaneous_jobs_keep_to_the_limit(start, monkeypatch):
    from gateway.jobs import submission

    arrived, goes_on, write = threading.Event(), threading.Event(), submission.write_data

    def write_slowly(*arguments):
        arrived.set()
        assert goes_on.wait(30)
        write(*arguments)

    monkeypatch.setattr(submission, "write_data", write_slowly)
    with start(limit={"runs": 1}) as gate, ThreadPoolExecutor() as threads:
        first = threads.submit(Submitted, gate)
        assert arrived.wait(30)
        with gate.http() as client:
            second = client.post(f"{OWN}/jobs", json=body())
            model = {"session_id": gate.session_id(), "model_seq_id": 0, "base_model": "tiny:full"}
            run = client.post("/api/v1/create_model", json=model)
        goes_on.set()
        assert {each.json()["type"] for each in (second, run)} == {"limit_exceeded"}
        assert first.result().about()["state"] in ("queued", "running")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"{OWN}/jobs/{{}}"),
        ("GET", f"{OWN}/runs/{{}}"),
        ("PATCH", f"{OWN}/runs/{{}}"),
        ("POST", f"{OWN}/runs/{{}}/stop"),
        ("GET", f"{OWN}/runs/{{}}/metrics"),
        ("POST", f"{OWN}/runs/{{}}/metrics"),
        ("GET", f"{OWN}/runs/{{}}/events"),
        ("GET", f"{OWN}/runs/{{}}/steps"),
        ("GET", "/api/v1/training_runs/{}"),
        ("GET", "/api/v1/training_runs/{}/checkpoints"),
    ],
)
def test_a_job_of_another_owner_appears_not_to_exist(world, method, path):
    answers = [
        world.gate.http(world.keys["foreign"]).request(
            method, path.format(run_id), json=None if method == "GET" else {"rows": []}
        )
        for run_id in (world.job(), "s-000000000000:train:0")
    ]
    assert [answer.status_code for answer in answers] == [404, 404]
    own = answers[0].text.replace(world.job(), "s-000000000000:train:0")
    assert own == answers[1].text


# --- Disks ------------------------------------------------------------------------------------


def test_a_full_disk_at_any_write_refuses_a_job_and_leaves_nothing(start):
    with start() as gate, gate.http() as client:
        folder = gate.settings.data_dir / "jobs"
        folder.mkdir(exist_ok=True)
        with UnreliableDisk(folder) as disk:
            for strike in disk.strikes(Fault.FULL):
                with strike:
                    answer = client.post(f"{OWN}/jobs", json=body())
                if answer.status_code == 200:
                    break
                assert (answer.status_code, answer.json()["type"]) == (507, "storage_full")
                assert not list(folder.glob("*")), strike.hit
        assert answer.status_code == 200
        Submitted(gate, answer.json()["id"]).process()


@pytest.mark.parametrize("work", ["life.write_request", "results.import_result"])
def test_a_job_waits_for_a_full_disk_and_says_so(start, monkeypatch, work):
    monkeypatch.setattr("gateway.jobs.life._REPEAT", 0.05)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*_arguments):
        raise full

    with start() as gate:
        with monkeypatch.context() as disk:
            disk.setattr(f"gateway.jobs.{work}", fail)
            job = Submitted(gate)
            if work.startswith("results"):
                job.write_result()
                job.exit(0)
            wait_until(lambda: "has freed space" in job.about()["reason"])
        if work.startswith("life"):
            job.write_result()
            job.exit(0)
        assert job.ended()["reason"] == "the job has finished"


def test_a_submission_that_was_killed_before_its_row_leaves_nothing_after_the_next_start(start):
    with start() as gate:
        job = Submitted(gate)
        job.process()
        folder = gate.settings.data_dir / "jobs"
    killed, other = folder / "s-000000000001_train_0", folder / "s-000000000002_train_0"
    for each in (killed, other):
        (each / "data").mkdir(parents=True)
        (each / "data/train.jsonl").write_text(ROW)
    (other / "job.json").write_text("{}")  # a job of which an older database knows nothing
    (job.folder / "job.json").unlink()  # a gateway that ended before it wrote the file
    with start() as gate:
        job.continued_by(gate).process(2)
        assert {each.name for each in folder.iterdir()} == {job.folder.name, other.name}
        (warning,) = gate.run(gate.gateway.collector.warnings())
        assert other.name in warning
