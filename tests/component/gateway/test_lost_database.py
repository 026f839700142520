"""A gateway that starts with another database than the one that its checkpoints are in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tinker
from typer.testing import CliRunner

from tandem.cli.main import app
from tests.support.files import tree
from tests.support.gateway.checkpoints import listed, place, step
from tests.support.gateway.running import KEY, running_gateway


@pytest.fixture
def saved(tmp_path):
    """What a stopped gateway left: its data directory, and the paths of what it saved."""
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.service() as service:
        training = service.create_lora_training_client("tiny", rank=4).result()
        step(training, 2)
        paths = [
            training.save_state("kept", user_metadata={"score": "1"}).result().path,
            training.save_weights_for_sampler("kept").result().path,
            training.save_weights_external("kept").result().path,
        ]
    return gate.settings.data_dir, training.model_id, paths


def files_of(data_dir: Path, run_id: str) -> set[Path]:
    run = run_id.replace(":", "_")
    return tree(data_dir / "checkpoints" / run) | tree(data_dir / "weights" / run)


def tandem(gate, *arguments: str):
    result = CliRunner().invoke(app, [*arguments, "--data-dir", str(gate.settings.data_dir)])
    assert result.exception is None, result.output
    return result


def remove(database: Path) -> dict[str, str]:
    for file in database.parent.glob("tandem.db*"):
        file.unlink()
    return {}


def empty(database: Path) -> dict[str, str]:
    remove(database)
    database.touch()
    return {}


def elsewhere(database: Path) -> dict[str, str]:
    return {"database_url": f"sqlite:///{database.with_name('other.db')}"}


@pytest.mark.parametrize("lose", [remove, empty, elsewhere])
def test_a_lost_database_costs_no_checkpoint_and_adopting_brings_all_back(saved, tmp_path, lose):
    data_dir, run_id, paths = saved
    before = files_of(data_dir, run_id)
    changes = lose(data_dir / "tandem.db")
    with running_gateway(tmp_path, session_ttl=600, **changes) as gate:
        assert files_of(data_dir, run_id) == before
        said = tandem(gate, "status")
        assert "does not belong to this data directory" in said.stderr
        assert "tandem checkpoints adopt" in said.stderr
        with gate.service() as service:  # work goes on, and removes nothing
            service.create_lora_training_client("tiny").result().save_state("new").result()
        done = json.loads(tandem(gate, "checkpoints", "adopt", "--json").stdout)
        assert (set(done["adopted"]), done["refused"]) == (set(paths), {})
        rest = tinker.RestClient(base_url=gate.url, api_key=KEY)
        found = listed(rest, run_id)
        assert set(found) == set(paths)
        assert found[paths[0]].user_metadata == {"score": "1"}
        assert rest.get_training_run(run_id).result().base_model == "tiny"
        assert rest.get_weights_info_by_tinker_path(paths[0]).result().lora_rank == 4
        assert "warning" not in tandem(gate, "status").stderr
    with running_gateway(tmp_path, session_ttl=600, **changes) as gate, gate.service() as service:
        assert files_of(data_dir, run_id) == before
        service.create_training_client_from_state_with_optimizer(paths[0]).result()
        _, trainer = gate.worker("trainer")
        assert trainer.step == 2
        client = service.create_sampling_client(model_path=paths[1]).result()
        prompt = tinker.ModelInput.from_ints([1, 2])
        assert client.sample(prompt, 1, tinker.SamplingParams(max_tokens=2)).result().sequences


def test_an_older_copy_of_the_database_costs_none_of_the_newer_checkpoints(saved, tmp_path):
    data_dir, run_id, paths = saved
    shutil.copytree(data_dir, tmp_path / "copy")
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.service() as service:
        training = service.create_training_client_from_state_with_optimizer(paths[0]).result()
        step(training)
        newer = training.save_state("newer").result().path
        (folder,) = place(gate, training.model_id)
    remove(data_dir / "tandem.db")
    for file in (tmp_path / "copy").glob("tandem.db*"):
        shutil.copy(file, data_dir / file.name)
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.service() as service:
        assert not folder.exists()
        assert (data_dir / "quarantine" / folder.relative_to(data_dir) / "checkpoint.json").exists()
        said = tandem(gate, "status").stderr
        assert str(folder.relative_to(data_dir)) in said
        assert newer in tandem(gate, "checkpoints", "adopt").stdout
        service.create_training_client_from_state_with_optimizer(newer).result()
        _, trainer = gate.worker("trainer")
        assert trainer.step == 3
        rest = tinker.RestClient(base_url=gate.url, api_key=KEY)
        assert set(listed(rest, run_id)) == set(paths)
