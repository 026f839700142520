"""The `tinker checkpoint` commands as they are published, and our own `tandem checkpoints`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.errors import InvalidRequest, NameTaken, ServerError
from tests.support.gateway.checkpoints import place, step
from tests.support.gateway.running import wait_for
from tests.support.gateway.tinker_command import TinkerCommand

BEFORE_ALL = ("--before", "2020-01-01")


@pytest.fixture(scope="module")
def tinker_process(gate):
    surroundings = {"TINKER_BASE_URL": gate.url, "TINKER_API_KEY": gate.settings.api_key}
    with TinkerCommand(**surroundings) as command:
        yield command


@pytest.fixture
def tinker_command(tinker_process):
    return partial(tinker_process.answer, "checkpoint")


@pytest.fixture
def tandem_command(gate):
    def run(*arguments: str) -> dict:
        directory = ["--data-dir", str(gate.settings.data_dir)]
        result = CliRunner().invoke(app, ["checkpoints", *arguments, *directory, "--json"])
        if result.exception is not None:
            raise result.exception
        return json.loads(result.stdout)

    return run


def paths(listed: dict) -> set[str]:
    return {checkpoint["tinker_path"] for checkpoint in listed["checkpoints"]}


def test_tinker_lists_describes_publishes_and_ages_checkpoints(training, tinker_command):
    path = training.save_state("one").result().path
    other = training.save_weights_for_sampler("two").result().path
    assert paths(tinker_command("list", "--run-id", training.model_id)) == {path, other}
    assert {path, other} <= paths(tinker_command("list", "--limit", "0"))
    assert paths(tinker_command("list", "--limit", "1")) == {other}, "the newest"
    info = tinker_command("info", path)
    assert (info["size_bytes"], info["public"], info["is_lora"]) == (21, False, False)
    tinker_command("publish", path)
    tinker_command("set-ttl", path, "--ttl", "7200")
    info = tinker_command("info", path)
    assert info["public"] is True
    assert info["expires_at"] is not None
    tinker_command("unpublish", path)
    tinker_command("set-ttl", path, "--remove")
    info = tinker_command("info", path)
    assert (info["public"], info["expires_at"]) == (False, None)


def test_tinker_deletes_by_path_and_by_run_type_and_date(
    gate, training, tinker_process, tinker_command
):
    states = [training.save_state(f"s{i}").result().path for i in range(3)]
    sampled = training.save_weights_for_sampler("w").result().path
    run = ("--run-id", training.model_id)
    assert tinker_command("delete", "-y", states[0]) == {"deleted_count": 1, "failed": []}
    again = tinker_command("delete", "-y", states[0])
    assert again["deleted_count"] == 0
    assert "there is no checkpoint" in again["failed"][0]["error"]
    _status, missed = tinker_process.run("checkpoint", "delete", "-y", *run, *BEFORE_ALL)
    assert "No checkpoints found" in missed
    tinker_command("delete", "-y", *run, "--type", "weights", "--after", "2020-01-01")
    assert paths(tinker_command("list", *run)) == {sampled}
    tinker_command("delete", "-y", *run)
    assert paths(tinker_command("list", *run)) == set()
    wait_for(lambda: place(gate, training.model_id) == [])


def test_tinker_downloads_external_weights(training, tinker_command, tmp_path):
    step(training, 2)
    path = training.save_weights_external("final").result().path
    answer = tinker_command("download", path, "--output", str(tmp_path))
    folder = Path(answer["destination"])
    assert (folder / "model.safetensors").read_bytes() == b"weights of step 2"
    assert {file.name for file in folder.iterdir()} == {"model.safetensors", "config.json"}
    assert answer["file_size_bytes"] == sum(file.stat().st_size for file in folder.iterdir())


def test_tinker_downloads_a_training_state_through_an_export(
    gate, training, tinker_command, tmp_path
):
    step(training, 3)
    path = training.save_state("final").result().path
    folder = Path(tinker_command("download", path, "--output", str(tmp_path))["destination"])
    assert (folder / "model.safetensors").read_bytes() == b"weights of step 3"
    listed = paths(tinker_command("list", "--limit", "0"))
    assert path in listed
    assert not any(p.endswith("/external_weights/download") for p in listed), "it was deleted"


def test_tandem_lists_and_deletes_checkpoints(gate, training, tandem_command):
    first = training.save_state("first").result().path
    second = training.save_weights_external("second").result().path
    listed = tandem_command("list", "--run", training.model_id)["checkpoints"]
    assert [c["tinker_path"] for c in listed] == [second, first]
    assert tandem_command("list", "--limit", "1")["checkpoints"][0]["tinker_path"] == second
    assert tandem_command("delete", first, "--yes") == {"deleted": [first]}
    with pytest.raises(ServerError, match="there is no checkpoint"):
        tandem_command("delete", first, "--yes")
    with pytest.raises(InvalidRequest, match="tinker://"):
        tandem_command("delete", "first", "--yes")
    wait_for(lambda: place(gate, training.model_id) == [])


def test_tandem_exports_checkpoints_of_every_kind(training, tandem_command, tmp_path):
    step(training)
    saves = {
        training.save_state("a").result().path: {"__0_0.distcp", ".metadata", "checkpoint.json"},
        training.save_weights_for_sampler("a").result().path: {"model.safetensors", "config.json"},
        training.save_weights_external("a").result().path: {"model.safetensors", "config.json"},
    }
    for number, (path, names) in enumerate(saves.items()):
        target = tmp_path / str(number)
        answer = tandem_command("export", path, str(target))
        assert {file.name for file in target.iterdir()} == names
        assert answer["bytes"] == sum(file.stat().st_size for file in target.iterdir())
        with pytest.raises(NameTaken):
            tandem_command("export", path, str(target))
    assert (tmp_path / "1" / "model.safetensors").read_bytes() == b"weights of step 1"


def test_tandem_merges_adapters_alone(training, tandem_command, tmp_path):
    path = training.save_weights_for_sampler("whole").result().path
    with pytest.raises(InvalidRequest, match="no LoRA adapter"):
        tandem_command("export", path, str(tmp_path / "out"), "--merged")
    assert list(tmp_path.iterdir()) == []
