"""A gateway starts with a database that lacks its checkpoints."""

from __future__ import annotations

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


def metrics(gate) -> str:
    with gate.http() as client:
        return client.get("/metrics").text


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
def test_a_gateway_with_another_database_serves_and_removes_nothing(saved, tmp_path, lose):
    data_dir, run_id, paths = saved
    before = files_of(data_dir, run_id)
    changes = lose(data_dir / "tandem.db")
    folder = run_id.replace(":", "_")
    for _ in range(2):
        with running_gateway(tmp_path, session_ttl=600, **changes) as gate:
            said = tandem(gate, "status").stderr
            unknown = ", ".join(f"{kind}/{folder}" for kind in ("checkpoints", "runs", "weights"))
            assert f"{unknown}: the database does not know" in said
            assert "tandem_gateway_unknown_folders 3.0" in metrics(gate)
            with gate.service() as service:  # work goes on, and removes nothing
                training = service.create_lora_training_client("tiny").result()
                assert training.save_state("new").result().path
                rest = tinker.RestClient(base_url=gate.url, api_key=KEY)
                with pytest.raises(tinker.NotFoundError):
                    rest.get_weights_info_by_tinker_path(paths[0]).result()
        assert files_of(data_dir, run_id) == before
    if changes:  # with the right database again, all is there
        with running_gateway(tmp_path, session_ttl=600) as gate, gate.service() as service:
            assert set(listed(tinker.RestClient(base_url=gate.url, api_key=KEY), run_id)) == {
                *paths
            }
            service.create_training_client_from_state_with_optimizer(paths[0]).result()
            _, trainer = gate.worker("trainer")
            assert trainer.step == 2


def test_an_older_copy_of_the_database_removes_no_newer_checkpoint(saved, tmp_path):
    data_dir, run_id, paths = saved
    shutil.copytree(data_dir, tmp_path / "copy")
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.service() as service:
        training = service.create_training_client_from_state_with_optimizer(paths[0]).result()
        step(training)
        training.save_state("newer").result()
        (folder,) = place(gate, training.model_id)
    remove(data_dir / "tandem.db")
    for file in (tmp_path / "copy").glob("tandem.db*"):
        shutil.copy(file, data_dir / file.name)
    with running_gateway(tmp_path, session_ttl=600) as gate:
        assert (folder / "checkpoint.json").exists()
        assert str(folder.parent.relative_to(data_dir)) in tandem(gate, "status").stderr
        rest = tinker.RestClient(base_url=gate.url, api_key=KEY)
        assert set(listed(rest, run_id)) == set(paths)
