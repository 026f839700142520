"""`tandem view`: the runs of a data directory, read from their files."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest

from gateway.runs.record.reader import read_index
from tandem.weights.model_store import RECORD_NAME, ModelRecord
from tests.support.gateway.running import running_gateway
from tests.support.gateway.speaking_models import byte_tokenizer, write_speaking_model

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A copy of the records of a gateway's run. Returns its folder, the run's id and its index."""
    folder = tmp_path_factory.mktemp("view")
    with running_gateway(folder / "first", session_ttl=600) as gate, gate.service() as service:
        metadata = {"name": HOSTILE, "config": '{"lr": 0.003}'}
        run = service.create_lora_training_client("tiny:full", user_metadata=metadata).result()
        path = f"/api/tandem/v1/runs/{run.model_id}"
        with gate.http() as client:
            for step in range(5):
                rows = [{"step": step, "values": {"reward": step / 4, "worst": "-Infinity"}}]
                assert client.post(f"{path}/metrics", json={"rows": rows}).is_success
                one = {"answer": HOSTILE, "tokens": byte_tokenizer().encode("H").ids}
                rollouts = [{**one, "reward": n} for n in (1, 2)]
                body = {"batch": f"b{step}", "step": step, "rollouts": rollouts}
                assert client.post(f"{path}/rollouts", json=body).is_success
        index = gate.run(gate.gateway.record.summaries([run.model_id]))[run.model_id]
        records = gate.settings.data_dir / "runs"
    data_dir = folder / "copy"
    shutil.copytree(records, data_dir / "runs")
    model = write_speaking_model(data_dir / "models" / "tiny", byte_tokenizer())
    record = ModelRecord(repository="o/tiny", revision="main", commit="", bytes=1, added_at=1.0)
    (model / RECORD_NAME).write_text(record.model_dump_json())
    return data_dir, run.model_id, index


@contextmanager
def viewing(data_dir):
    """Run the command beside a gateway's settings. Yields a client, and its first lines."""
    elsewhere = {"TANDEM_DATABASE_URL": "postgresql://nowhere", "TANDEM_PRIVATE_DIR": "/nowhere"}
    start = "from tandem.cli import main; main()"
    command = [sys.executable, "-c", start, "view", str(data_dir), "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, **elsewhere, "PYTHONUNBUFFERED": "1"},
    )
    try:
        said = ""
        while not (url := re.search(r"(http://127\.0\.0\.1:\d+) shows", said)):
            line = process.stdout.readline()
            assert line, said
            said += line
        headers = {"Accept": "text/html"}
        with httpx.Client(base_url=url[1], headers=headers, timeout=60, verify=False) as client:
            yield client, said
    finally:
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
        rest, _ = process.communicate(timeout=60)
        assert (process.returncode, rest) == (0, "")


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_copied_directory_shows_its_runs_curves_and_rollouts_and_stays_as_it_is(kept):
    data_dir, run, _ = kept
    before = files_of(data_dir)
    with viewing(data_dir) as (client, _):
        listed = client.get("/")
        assert listed.status_code == 200
        assert "&lt;script&gt;alert(1)" in listed.text
        assert HOSTILE not in listed.text
        shown = client.get(f"/runs/{run}").text
        for text in ('data-name="reward"', "0.003", "<polyline", "/rollouts"):
            assert text in shown
        curves = client.get(f"/runs/{run}/curves?name=reward&name=worst").json()
        assert curves["reward"]["value"] == [0, 0.25, 0.5, 0.75, 1.0]
        assert curves["worst"]["value"] == ["-Infinity"] * 5
        rollouts = client.get(f"/runs/{run}/rollouts?step=3&order=-reward").text
        assert re.findall(r'title="reward">(\d)<', rollouts) == ["2", "1"]
        tokens = client.get(f"/runs/{run}/rollouts/3/0").text
        assert ">H</span>" in tokens
    assert files_of(data_dir) == before


def test_nothing_can_be_changed_or_asked_under_another_name(kept):
    data_dir, run, _ = kept
    with viewing(data_dir) as (client, _):
        shown = client.get(f"/runs/{run}").text
        assert "<form" not in shown
        for unknown in ("Checkpoints", "Events", "0 trained"):  # the files do not have them
            assert unknown not in shown
        for address in re.findall(r'href="(/[^"]*)"', shown):
            assert client.get(address.replace("&amp;", "&")).status_code == 200, address
        for path in ("/devices", "/chat", "/sign-in", f"/api/tandem/v1/runs/{run}"):
            assert path not in shown
            assert client.get(path).status_code == 404
        assert client.post(f"/runs/{run}").status_code == 405
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 400
        cookie = f"tandem_{client.base_url.port}=of-a-gateway-that-had-this-port"
        asked = {"Cookie": cookie, "Accept": "text/html"}
        assert client.get(f"/runs/{run}", headers=asked).status_code == 200


def test_a_damaged_record_is_named_and_the_others_are_shown(kept, tmp_path):
    data_dir, run, _ = kept
    shutil.copytree(data_dir, tmp_path / "data")
    broken = tmp_path / "data" / "runs" / "s-broken_train_0" / "record"
    broken.mkdir(parents=True)
    (broken / "run.json").write_text('{"id": 1')
    (metrics,) = (tmp_path / "data" / "runs").glob("*/record/metrics-*-0.jsonl")
    metrics.write_bytes(b"garbage\n" + metrics.read_bytes() + b'{"step": 9, "at":')
    with viewing(tmp_path / "data") as (client, said):
        assert "left out s-broken_train_0: run.json is missing or damaged" in said
        curves = client.get(f"/runs/{run}/curves?name=reward").json()
        assert curves["reward"]["step"] == [0, 1, 2, 3, 4]


def test_the_index_of_the_files_is_that_of_the_database(kept):
    data_dir, run, index = kept
    (folder,) = data_dir.glob("runs/*/record")
    found, batches = read_index(folder, run)
    same = ("step", "first_step", "by_user", "last", "rows", "rollouts", "bytes")
    assert [getattr(found, name) for name in same] == [getattr(index, name) for name in same]
    assert [batch.step for batch in batches] == [0, 1, 2, 3, 4]


def test_a_directory_without_records_is_refused_with_a_sentence(tmp_path):
    command = [sys.executable, "-m", "gateway.admin.view", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == (
        f"{tmp_path} has no records of runs (runs/*/record); name a data directory of Tandem"
    )
    assert json.dumps(done.stderr).count("\\n") == 1
