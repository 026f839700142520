"""The `tinker` command against a gateway: who, which models, which runs, traces, usage."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
import tinker

from tests.support.gateway.running import KEY, datum
from tests.support.gateway.tinker_command import TinkerCommand


@pytest.fixture(scope="module")
def command(gate):
    with TinkerCommand(TINKER_BASE_URL=gate.url, TINKER_API_KEY=KEY) as command:
        yield command


@pytest.fixture(scope="module")
def training(gate):
    with tinker.ServiceClient(base_url=gate.url, api_key=KEY, project_id="cli") as service:
        training = service.create_lora_training_client(
            "tiny:full", user_metadata={"why": "because"}
        ).result()
        training.forward_backward([datum([1, 2, 3])], "cross_entropy").result()
        training.save_state("one").result()
        yield training


def test_version_and_models(training, command):
    assert tinker.__version__ in command.shown("version")
    (model,) = command.answer("model", "list", "TIN")["models"]
    assert (model["model_name"], model["max_context_length"]) == ("tiny", 64)
    assert (model["trainable"], model["sampleable"]) == (True, True)
    assert "tiny" in command.shown("model", "list")


def test_who_the_key_is_of_and_whether_it_works(gate, command):
    assert command.answer("auth", "whoami")["user_urn"] == "tml:organization_user:local"
    assert "tml:organization:tandem" in command.shown("auth", "whoami")
    assert "Tinker accessible: yes" in command.shown("auth", "status")
    with TinkerCommand(TINKER_BASE_URL=gate.url, TINKER_API_KEY="tml-wrong") as command:
        assert "Authentication failed" in command.refused("auth", "status")


def test_login_stores_a_key_that_works_and_says_why_another_does_not(gate, tmp_path):
    elsewhere = {"TINKER_BASE_URL": gate.url, "TINKER_API_KEY": "", "HOME": str(tmp_path)}
    with TinkerCommand(**elsewhere) as command:
        said = command.refused("auth", "login", typed="tml-wrong\n")
        assert "the API key is missing or wrong" in " ".join(said.split())
        assert "Logged in as local (tandem)" in command.shown("auth", "login", typed=f"{KEY}\n")
        stored = json.loads((tmp_path / ".tinker" / "credentials.json").read_text())
        assert stored["keys"][stored["default"]]["key"] == KEY
        assert "Removed credential 'local-key'" in command.shown("auth", "logout")


def test_runs_are_listed_and_shown(training, command):
    listed = command.answer("run", "list", "--limit", "0")["runs"]
    assert [run["training_run_id"] for run in listed] == [training.model_id]
    run = command.answer("run", "info", training.model_id)
    assert (run["base_model"], run["user_metadata"]) == ("tiny", {"why": "because"})
    table = command.shown("run", "info", training.model_id)
    assert "weights/one" in table
    assert "because" in table
    columns = "id,model,owner,lora,updated,status,checkpoint,checkpoint_time"
    assert "OK" in command.shown("run", "list", "-c", columns)
    assert "not found" in command.refused("run", "info", "s-0:train:0")


def test_a_trace_is_written_to_a_file(training, command, tmp_path):
    session_id = training.model_id.partition(":")[0]
    target = tmp_path / "session.pftrace"
    told = command.answer("session", "export-trace", session_id, "-o", str(target))
    assert told["file_size_bytes"] == target.stat().st_size
    names = [event["name"] for event in json.loads(target.read_text())["traceEvents"]]
    assert "forward_backward" in names
    assert "Saved to" in command.shown("session", "export-trace", session_id, "-o", f"{target}2")
    url = command.answer("session", "export-trace", session_id, "--url-only")["url"]
    assert url.startswith("http://127.0.0.1:")


def test_usage_and_storage_are_shown(training, command, tmp_path):
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = [
        (hour + timedelta(hours=shift)).isoformat().replace("+00:00", "Z") for shift in (-1, 2)
    ]
    rows = command.answer("billing", "usage", *window)["data"]
    kinds = {row["event_info"]["type"]: row["event_info"] for row in rows}
    assert kinds["training"]["token_count"] == 3
    assert kinds["checkpoint"]["count"] == 1
    assert "hourly usage row" in command.shown("billing", "usage", *window)
    csv = tmp_path / "usage.csv"
    command.shown("billing", "usage", *window, "--csv", str(csv))
    assert csv.read_text().splitlines()[0].startswith("bucket_start,bucket_end,base_model")
    storage = command.answer("billing", "checkpoint-storage", "--project-id", "cli")
    (row,) = storage["data"]
    assert (row["checkpoint_count"], row["size_bytes"]) == (1, 21)
    assert "Current checkpoint storage" in command.shown("billing", "checkpoint-storage")
