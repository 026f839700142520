"""`tandem config --resources`."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from tandem.cli.main import app
from tests.support.tiny_model import write_tiny_model


def test_each_worker_of_each_pool_is_shown_with_what_its_pods_request(tmp_path, monkeypatch):
    model = tmp_path / "tiny"
    write_tiny_model(model)
    pools = [{"name": "train", "roles": ["trainer"]}, {"name": "sample", "roles": ["sampler"]}]
    monkeypatch.setenv("TANDEM_CLAIM_POOLS", json.dumps(pools))
    said = CliRunner().invoke(app, ["config", "--resources", str(model), "--json"])
    rows = json.loads(said.stdout)["rows"]
    assert [row["pool"] for row in rows] == ["train", "train", "sample"]
    assert all(row["memory"] > row["shared_memory"] > 0 for row in rows)
    table = CliRunner().invoke(app, ["config", "--resources", str(model)]).stdout
    assert "trainer with 1 rank, of all parameters" in table


def test_a_folder_without_a_model_is_refused_with_the_reason(tmp_path):
    said = CliRunner().invoke(app, ["config", "--resources", str(tmp_path)])
    assert said.exit_code != 0
    assert "has no safetensors" in str(said.exception)
