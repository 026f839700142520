"""Every `tinker` command, with its JSON output."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tinker
from click.testing import CliRunner, Result
from tinker import SamplingClient, TrainingClient

from tests.conformance.conform.calls import rest_client, settled
from tests.conformance.conform.claims import proves
from tests.support.plain_model import load, plain_logprobs, with_adapter
from tests.support.sdk import largest_difference, logprobs, sequences, supervised
from tests.support.stacks import TIED, TestStack

NUMBERS = itertools.count()
PROBES = sequences(2, seed=400)


def run_command(*arguments: str, typed: str | None = None) -> Result:
    """A command in this process, which raises the command's exceptions."""
    from tinker.cli.__main__ import main_cli

    return CliRunner().invoke(main_cli, list(arguments), input=typed, catch_exceptions=False)


def answer(*arguments: str):
    result = run_command("-f", "json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def path(runs: dict[str, TrainingClient]) -> str:
    return settled(runs["lora"].save_state(f"cli-{next(NUMBERS)}")).path


@pytest.mark.core
@proves("tinker version", that="names the installed release, in a process of its own")
def test_version(stack: TestStack) -> None:
    environment = {**os.environ, "PYTHONPATH": os.environ.get("TANDEM_TEST_SDK", "")}
    command = [sys.executable, "-m", "tinker.cli", "version"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout == f"tinker {tinker.__version__}\n"


@proves("tinker model list", that="lists the gateway's models, and those that match a word")
def test_model_list(stack: TestStack) -> None:
    for arguments in ((), ("TIED",)):
        (model,) = answer("model", "list", *arguments)["models"]
        assert (model["model_name"], model["trainable"]) == (TIED, True)
    from tinker.cli.exceptions import TinkerCliError

    with pytest.raises(TinkerCliError, match="No model name contains"):
        run_command("model", "list", "no-such-model")


@pytest.mark.core
@proves("tinker run list", that="lists the runs, as many as were asked for")
@proves("tinker run info", that="shows the run's base model, rank and metadata")
def test_run_list_and_info(runs: dict[str, TrainingClient]) -> None:
    listed = answer("run", "list", "--limit", "0")["runs"]
    assert {run.model_id for run in runs.values()} <= {run["training_run_id"] for run in listed}
    assert answer("run", "list", "--limit", "1")["runs"] == listed[:1]
    shown = answer("run", "info", runs["lora"].model_id)
    assert (shown["base_model"], shown["lora_rank"]) == (TIED, 4)
    assert shown["user_metadata"] == {"kind": "lora"}


@pytest.mark.core
@proves("tinker checkpoint list", that="lists a run's checkpoints, and the newest of all runs")
@proves("tinker checkpoint info", that="shows the checkpoint's kind, size and path")
def test_checkpoint_list_and_info(path: str, runs: dict[str, TrainingClient]) -> None:
    of_run = answer("checkpoint", "list", "--run-id", runs["lora"].model_id)["checkpoints"]
    assert path in {each["tinker_path"] for each in of_run}
    (newest,) = answer("checkpoint", "list", "--limit", "1")["checkpoints"]
    assert newest["tinker_path"] == path
    shown = json.dumps(answer("checkpoint", "info", path))
    (listed,) = [each for each in of_run if each["tinker_path"] == path]
    for part in (path, "training", str(listed["size_bytes"])):
        assert part in shown


@pytest.mark.core
@proves(
    "tinker checkpoint publish",
    "tinker checkpoint unpublish",
    "tinker checkpoint set-ttl",
    that="is seen in the checkpoint's description",
)
def test_checkpoint_publish_and_ttl(path: str) -> None:
    def described() -> tinker.types.Checkpoint:
        run_id = path.split("/")[2]
        found = settled(rest_client().list_checkpoints(run_id)).checkpoints
        return next(each for each in found if each.tinker_path == path)

    def done(*arguments: str) -> None:
        result = run_command("checkpoint", *arguments)
        assert result.exit_code == 0, result.output

    done("publish", path)
    assert described().public
    done("unpublish", path)
    assert not described().public
    done("set-ttl", path, "--ttl", "7200")
    left = described().expires_at - datetime.now(UTC)
    assert timedelta(minutes=118) < left <= timedelta(minutes=120)
    done("set-ttl", path, "--remove")
    assert described().expires_at is None


@pytest.mark.core
@proves("tinker checkpoint delete", that="removes the named checkpoints from every list")
def test_checkpoint_delete(path: str) -> None:
    assert answer("checkpoint", "delete", path, "-y") == {"deleted_count": 1, "failed": []}
    left = settled(rest_client().list_user_checkpoints(limit=1000)).checkpoints
    assert path not in {each.tinker_path for each in left}
    again = answer("checkpoint", "delete", path, "-y")
    assert again["deleted_count"] == 0
    assert [each["tinker_path"] for each in again["failed"]] == [path]


@proves(
    "tinker checkpoint download",
    that="the files of a training checkpoint are an adapter with the trainer's logprobs, and its "
    "temporary export is deleted",
)
def test_checkpoint_download(
    runs: dict[str, TrainingClient], path: str, model_path: Path, tmp_path: Path
) -> None:
    expected = logprobs(runs["lora"], PROBES)
    got = answer("checkpoint", "download", path, "-o", str(tmp_path))
    assert got["checkpoint_path"] == path
    folder = Path(got["destination"])
    assert got["file_size_bytes"] >= (folder / "adapter_model.safetensors").stat().st_size
    model = with_adapter(load(model_path), folder)
    assert largest_difference(plain_logprobs(model, PROBES), expected) < 1e-4
    left = settled(rest_client().list_user_checkpoints(limit=1000)).checkpoints
    assert not any(each.tinker_path.endswith("external_weights/download") for each in left)


@proves(
    "tinker checkpoint push-hf",
    that="hands the hub an adapter with a model card that names its base model",
)
def test_checkpoint_push_hf(
    runs: dict[str, TrainingClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    uploaded: dict[str, str] = {}

    class Hub:
        """Replaces the hub's client, which needs the network."""

        def whoami(self) -> dict[str, str]:
            return {"name": "somebody"}

        def create_repo(self, **_settings: object) -> None:
            pass

        def upload_folder(self, *, folder_path: str, **_settings: object) -> None:
            for file in Path(folder_path).iterdir():
                text = file.read_text() if file.suffix in (".md", ".json") else ""
                uploaded[file.name] = text

    def absent(**_settings: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", absent)
    export = settled(runs["lora"].save_weights_external(f"hub-{next(NUMBERS)}")).path
    got = answer("checkpoint", "push-hf", export, "--repo", "somebody/adapter")
    assert got == {"checkpoint_path": export, "repo_id": "somebody/adapter", "public": False}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= set(uploaded)
    assert f"base_model: {TIED}" in uploaded["README.md"]
    assert json.loads(uploaded["adapter_config.json"])["r"] == 4


@proves("tinker session export-trace", that="writes a trace with the session's operations")
def test_session_export_trace(
    session_id: str, runs: dict[str, TrainingClient], tmp_path: Path
) -> None:
    target = tmp_path / "session.pftrace"
    got = answer("session", "export-trace", session_id, "-o", str(target))
    assert got["session_id"] == session_id
    assert got["file_size_bytes"] == target.stat().st_size
    assert "save_weights" in target.read_text()
    address = answer("session", "export-trace", session_id, "--url-only")["url"]
    assert address.startswith("http")


@proves("tinker billing usage", that="has the window's rows, with their sessions' metadata")
@proves("tinker billing checkpoint-storage", that="counts the project's checkpoints and bytes")
def test_billing(
    runs: dict[str, TrainingClient], session_id: str, base_sampler: SamplingClient, tmp_path: Path
) -> None:
    settled(runs["lora"].forward([supervised([1, 2, 3])], "cross_entropy"))
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = [
        (hour + timedelta(hours=shift)).isoformat().replace("+00:00", "Z") for shift in (-1, 2)
    ]
    usage = answer("billing", "usage", *window)
    assert usage["sessions"][session_id]["user_metadata"] == {"purpose": "conformance"}
    trained = [row for row in usage["data"] if row["event_info"]["type"] == "training"]
    assert sum(row["event_info"]["token_count"] for row in trained) > 0
    assert run_command("billing", "usage", *window, "--csv", str(tmp_path / "usage.csv"))
    assert (tmp_path / "usage.csv").read_text().count("\n") >= 2

    storage = answer("billing", "checkpoint-storage", "--project-id", "conformance")
    listed = settled(rest_client().list_user_checkpoints(limit=1000)).checkpoints
    (row,) = storage["data"]
    of_project = {run.model_id for run in runs.values()}
    least = [each for each in listed if each.tinker_path.split("/")[2] in of_project]
    assert row["checkpoint_count"] >= len(least) > 0
    assert row["size_bytes"] >= sum(each.size_bytes for each in least)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for credentials. The environment has no key."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@proves("tinker auth whoami", that="names the key's owner and organization")
def test_auth_whoami(stack: TestStack) -> None:
    who = answer("auth", "whoami")
    assert who == settled(rest_client().whoami()).model_dump()


@proves("tinker auth status", that="tells a key that works from one that does not")
def test_auth_status(stack: TestStack, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run_command("auth", "status").output
    assert "Credentials available: yes" in shown
    assert "Tinker accessible: yes" in shown
    from tinker.cli.exceptions import TinkerCliError

    monkeypatch.setenv("TINKER_API_KEY", "tml-not-a-key-of-this-gateway")
    with pytest.raises(TinkerCliError, match="Authentication failed"):
        run_command("auth", "status")


@proves("tinker auth login", that="stores a key that the gateway knows, and refuses another")
@proves("tinker auth logout", that="forgets the stored key")
def test_auth_login_and_logout(
    stack: TestStack, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinker.cli.exceptions import TinkerCliError

    key = stack.stack.endpoint.api_key
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(TinkerCliError, match="Could not validate"):
        run_command("auth", "login", typed="tml-not-a-key-of-this-gateway\n")
    shown = run_command("auth", "login", typed=f"{key}\n").output
    assert "Logged in as" in shown
    stored = json.loads((home / ".tinker" / "credentials.json").read_text())
    assert stored["keys"][stored["default"]]["key"] == key
    assert settled(rest_client().whoami()).user_urn, "the stored key is used"
    assert "Removed credential" in run_command("auth", "logout").output
    assert tinker.auth.tinker_has_credentials() is False
