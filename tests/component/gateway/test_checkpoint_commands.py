"""`tandem checkpoints`, and `tinker checkpoint` beyond the conformance suite."""

from __future__ import annotations

import json

import pytest

from tandem.errors import InvalidRequest, NameTaken, UnknownWeights
from tests.support.gateway.checkpoints import listed, place, step
from tests.support.gateway.running import KEY
from tests.support.sdk import run_tinker
from tests.support.waiting import wait_until


@pytest.fixture
def tandem_command(tandem):
    return lambda *arguments: json.loads(tandem("checkpoints", *arguments, "--json"))


def test_tinker_deletes_by_run_type_and_date(gate, training, rest):
    training.save_state("state").result()
    sampled = training.save_weights_for_sampler("sampled").result().path
    chosen = ("--run-id", training.model_id, "--type", "weights", "--after", "2020-01-01")
    run_tinker(gate.url, KEY, "checkpoint", "delete", "-y", *chosen)
    assert set(listed(rest, training.model_id)) == {sampled}


def test_tandem_lists_and_deletes_checkpoints(gate, training, tandem_command):
    first = training.save_state("first").result().path
    second = training.save_weights_external("second").result().path
    listed = tandem_command("list", "--run", training.model_id)["checkpoints"]
    assert [c["tinker_path"] for c in listed] == [second, first]
    assert tandem_command("list", "--limit", "1")["checkpoints"][0]["tinker_path"] == second
    assert tandem_command("delete", first, "--yes") == {"deleted": [first]}
    with pytest.raises(UnknownWeights, match="there is no checkpoint"):
        tandem_command("delete", first, "--yes")
    with pytest.raises(InvalidRequest, match="tinker://"):
        tandem_command("delete", "first", "--yes")
    wait_until(lambda: place(gate, training.model_id) == [])


def test_tandem_exports_checkpoints_of_every_kind(training, tandem_command, tmp_path):
    step(training)
    saves = {
        training.save_state("a").result().path: {"rank-0-0.safetensors", "checkpoint.json"},
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
