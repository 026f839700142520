"""The `tinker` command against a gateway: who, which models, which runs, traces, usage."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
import tinker

from tests.support.gateway.running import KEY, datum, running_gateway


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    with running_gateway(tmp_path_factory.mktemp("cli"), session_ttl=600) as gate:
        yield gate


@pytest.fixture(autouse=True)
def surroundings(gate, monkeypatch, tmp_path):
    monkeypatch.setenv("TINKER_BASE_URL", gate.url)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(scope="module")
def training(gate):
    with tinker.ServiceClient(base_url=gate.url, api_key=KEY, project_id="cli") as service:
        training = service.create_lora_training_client(
            "tiny:full", user_metadata={"why": "because"}
        ).result()
        training.forward_backward([datum([1, 2, 3])], "cross_entropy").result()
        training.save_state("one").result()
        yield training


def run(*arguments: str, typed: str | None) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own: within this one, clients of other gateways that
    earlier tests closed make it wait."""
    return subprocess.run(
        [sys.executable, "-m", "tinker.cli", *arguments],
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def shown(*arguments: str, typed: str | None = None) -> str:
    ended = run(*arguments, typed=typed)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def refused(*arguments: str, typed: str | None = None) -> str:
    ended = run(*arguments, typed=typed)
    assert ended.returncode != 0, ended.stdout
    return ended.stdout + ended.stderr


def answer(*arguments: str) -> dict:
    return json.loads(shown("-f", "json", *arguments))


def test_version_and_models(training):
    assert tinker.__version__ in shown("version")
    (model,) = answer("model", "list", "TIN")["models"]
    assert (model["model_name"], model["max_context_length"]) == ("tiny", 64)
    assert (model["trainable"], model["sampleable"]) == (True, True)
    assert "tiny" in shown("model", "list")


def test_who_the_key_is_of_and_whether_it_works(monkeypatch):
    assert answer("auth", "whoami")["user_urn"] == "tml:organization_user:local"
    assert "tml:organization:tandem" in shown("auth", "whoami")
    assert "Tinker accessible: yes" in shown("auth", "status")
    monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
    assert "Authentication failed" in refused("auth", "status")


def test_login_stores_a_key_that_works_and_says_why_another_does_not(monkeypatch, tmp_path):
    monkeypatch.delenv("TINKER_API_KEY")
    said = refused("auth", "login", typed="tml-wrong\n")
    assert "the API key is missing or wrong" in " ".join(said.split())
    assert "Logged in as local (tandem)" in shown("auth", "login", typed=f"{KEY}\n")
    stored = json.loads((tmp_path / ".tinker" / "credentials.json").read_text())
    assert stored["keys"][stored["default"]]["key"] == KEY
    assert "Removed credential 'local-key'" in shown("auth", "logout")


def test_runs_are_listed_and_shown(training):
    listed = answer("run", "list", "--limit", "0")["runs"]
    assert [run["training_run_id"] for run in listed] == [training.model_id]
    run = answer("run", "info", training.model_id)
    assert (run["base_model"], run["user_metadata"]) == ("tiny", {"why": "because"})
    table = shown("run", "info", training.model_id)
    assert "weights/one" in table
    assert "because" in table
    columns = "id,model,owner,lora,updated,status,checkpoint,checkpoint_time"
    assert "OK" in shown("run", "list", "-c", columns)
    assert "not found" in refused("run", "info", "s-0:train:0")


def test_a_trace_is_written_to_a_file(training, tmp_path):
    session_id = training.model_id.partition(":")[0]
    target = tmp_path / "session.pftrace"
    told = answer("session", "export-trace", session_id, "-o", str(target))
    assert told["file_size_bytes"] == target.stat().st_size
    names = [event["name"] for event in json.loads(target.read_text())["traceEvents"]]
    assert "forward_backward" in names
    assert "Saved to" in shown("session", "export-trace", session_id, "-o", f"{target}2")
    url = answer("session", "export-trace", session_id, "--url-only")["url"]
    assert url.startswith("http://127.0.0.1:")


def test_usage_and_storage_are_shown(training, tmp_path):
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = [
        (hour + timedelta(hours=shift)).isoformat().replace("+00:00", "Z") for shift in (-1, 2)
    ]
    rows = answer("billing", "usage", *window)["data"]
    kinds = {row["event_info"]["type"]: row["event_info"] for row in rows}
    assert kinds["training"]["token_count"] == 3
    assert kinds["checkpoint"]["count"] == 1
    assert "hourly usage row" in shown("billing", "usage", *window)
    csv = tmp_path / "usage.csv"
    shown("billing", "usage", *window, "--csv", str(csv))
    assert csv.read_text().splitlines()[0].startswith("bucket_start,bucket_end,base_model")
    storage = answer("billing", "checkpoint-storage", "--project-id", "cli")
    (row,) = storage["data"]
    assert (row["checkpoint_count"], row["size_bytes"]) == (1, 21)
    assert "Current checkpoint storage" in shown("billing", "checkpoint-storage")
