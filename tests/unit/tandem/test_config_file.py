"""The settings file of `tandem up --config`."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from tandem.cli import up
from tandem.cli.main import app
from tandem.errors import InvalidRequest, UnknownSetting
from tandem.settings.config_file import apply_config_file, read_config_file, why_exposed
from tandem.settings.gateway import GatewaySettings

EXAMPLE = """
# A comment
port = 8100
recovery_enabled = false
models = { tiny = "./models/tiny" }

[trainer]
ranks = 2

[limit]
runs = 4

[[groups]]
name = "all"
devices = ["cpu:0"]
roles = ["trainer", "sampler"]
"""


def written(tmp_path, text: str):
    path = tmp_path / "tandem.toml"
    path.write_text(text)
    return path


def test_flat_names_and_tables_name_settings(tmp_path):
    found = read_config_file(written(tmp_path, EXAMPLE))
    groups = [{"name": "all", "devices": ["cpu:0"], "roles": ["trainer", "sampler"]}]
    assert {name: each.text for name, each in found.items()} == {
        "TANDEM_PORT": "8100",
        "TANDEM_RECOVERY_ENABLED": "false",
        "TANDEM_MODELS": '{"tiny": "./models/tiny"}',
        "TANDEM_TRAINER_RANKS": "2",
        "TANDEM_LIMIT_RUNS": "4",
        "TANDEM_GROUPS": json.dumps(groups),
    }
    assert found["TANDEM_TRAINER_RANKS"].line == 8


def test_the_environment_wins_over_the_file(tmp_path, monkeypatch):
    environment = {"TANDEM_PORT": "9000"}
    new = apply_config_file(written(tmp_path, EXAMPLE), environment)
    assert "TANDEM_PORT" not in new
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    settings = GatewaySettings()
    assert (settings.port, settings.trainer.ranks, settings.limit.runs) == (9000, 2, 4)
    assert settings.recovery_enabled is False
    assert settings.groups[0].name == "all"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("host = 'x'\npotr = 1\n", "line 2: potr is unknown; did you mean port?"),
        (
            "[trainer]\n\nrnaks = 2\n",
            "line 3: trainer.rnaks is unknown; did you mean trainer_r",
        ),
        ("[trianer]\nranks = 2\n", "line 2: trianer.ranks is unknown; did you mean trainer_r"),
        ("trainer.rnaks = 2\n", "line 1: trainer.rnaks is unknown"),
        ("zzzzzzzz = 2\n", r"zzzzzzzz is unknown; docs/operations.md#settings has the names"),
    ],
)
def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_name(tmp_path, text, sentence):
    with pytest.raises(UnknownSetting, match=sentence):
        read_config_file(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("port = \n", "is not TOML: Invalid value"),
        ("port = 1\nTANDEM_PORT = 2\n", "has TANDEM_PORT twice, in the lines 1 and 2"),
        ("port = 2026-01-01\n", "no setting is of the type date"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(tmp_path, text, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        read_config_file(written(tmp_path, text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidRequest, match=r"none\.toml cannot be read: No such file"):
        read_config_file(tmp_path / "none.toml")


def test_secrets_that_others_may_read_are_told(tmp_path):
    path = written(tmp_path, 'api_key = "tml-x"\nport = 1\n')
    path.chmod(0o644)
    assert f"{path} holds TANDEM_API_KEY, and other users" in why_exposed(path)
    path.chmod(0o600)
    assert why_exposed(path) == ""
    public = written(tmp_path, "port = 1\n")
    public.chmod(0o644)
    assert why_exposed(public) == ""


def test_config_shows_each_value_with_its_source(tmp_path, monkeypatch):
    path = written(tmp_path, EXAMPLE)
    monkeypatch.setenv("TANDEM_PORT", "9000")
    with patch.dict(os.environ):  # removes the variables of the file
        done = CliRunner().invoke(app, ["config", "--changed", "--config", str(path)])
    assert done.exit_code == 0, done.output
    shown = [line for line in done.stdout.splitlines() if line.startswith("TANDEM_")]
    assert "TANDEM_PORT=9000  # the environment" in shown
    assert f"TANDEM_TRAINER_RANKS=2  # {path}, line 8" in shown


def test_an_option_of_up_wins_over_its_file(tmp_path, monkeypatch):
    given = {}

    @contextmanager
    def stack(**arguments: object):
        given.update(arguments)
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(up, "Stack", stack)
    monkeypatch.setattr(up.signal, "signal", lambda number, handler: None)
    path = written(tmp_path, f"port = 8100\ndata_dir = '{tmp_path / 'state'}'\n")
    with patch.dict(os.environ):
        CliRunner().invoke(app, ["up", "--config", str(path), "--port", "8200"])
        assert os.environ["TANDEM_PORT"] == "8100"
    assert given["data_dir"] == tmp_path / "state"
    assert given["settings"] == {"port": "8200"}, "which wins over the environment"
