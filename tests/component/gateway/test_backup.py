"""Backups of a serving gateway, restored over later changes."""

from __future__ import annotations

import errno
import json
import shutil
import sqlite3
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import pytest
import tinker
from typer.testing import CliRunner

from gateway.admin.backup import _replace_sqlite
from gateway.storage.database import Database
from tandem.cli.main import app
from tandem.errors import InvalidRequest
from tests.support.gateway.running import KEY, running_gateway
from tests.support.postgres import on_sqlite, programs, url_for

pytestmark = pytest.mark.usefixtures("each_database")


class Place:
    """A data directory with its backups and commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data_dir = folder / "data"
        self.backup = folder / "backup"
        self.dump = folder / "dump.sql"

    def tandem(self, *arguments: str, ok: bool = True):
        done = CliRunner().invoke(app, [*arguments, "--data-dir", str(self.data_dir)])
        assert (done.exception is None) == ok, done.output
        return done

    def back_up(self) -> None:
        if url_for(self.data_dir):
            self._postgres("pg_dump", "--file", str(self.dump), "--clean")
        self.tandem("backup", str(self.backup))

    def restore(self) -> dict:
        source = [str(self.backup)]
        if url_for(self.data_dir):
            self._postgres("psql", "--quiet", "--file", str(self.dump))
            source = []
        return json.loads(self.tandem("restore", *source, "--json").stdout)

    def _postgres(self, program: str, *arguments: str) -> None:
        command = [programs() / program, *arguments, url_for(self.data_dir)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    def files(self) -> set[Path]:
        """Checkpoint and version files, relative to the data directory."""
        found = [*self.data_dir.glob("weights/**/*"), *self.data_dir.glob("checkpoints/**/*")]
        return {path.relative_to(self.data_dir) for path in found if path.is_file()}


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_DATABASE_URL", url_for(tmp_path / "data"))
    monkeypatch.setenv("TANDEM_LEADER_TIMEOUT", "1")
    return Place(tmp_path)


def step(training) -> None:
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [1, 2, 3], "weights": [1.0, 1.0, 1.0]},
    )
    training.forward_backward([datum], "cross_entropy").result()
    training.optim_step(tinker.AdamParams()).result()


def listed(gate) -> set[str]:
    rest = tinker.RestClient(base_url=gate.url, api_key=KEY)
    found = rest.list_user_checkpoints(limit=1000).result().checkpoints
    return {checkpoint.tinker_path for checkpoint in found}


def test_a_restored_database_knows_what_was_saved_before_and_nothing_since_is_removed(place):
    with running_gateway(place.folder, session_ttl=600) as gate, gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        step(training)
        before = [training.save_state("before").result().path]
        before.append(training.save_weights_for_sampler("before").result().path)
        overwritten = training.save_state("twice").result().path
        gone = training.save_state("gone").result().path
        place.back_up()
        step(training)
        since = [training.save_state("since").result().path]
        since.append(training.save_weights_for_sampler("since").result().path)
        assert training.save_state("twice", overwrite=True).result().path == overwritten
        tinker.RestClient(base_url=gate.url, api_key=KEY).delete_checkpoint_from_tinker_path(
            gone
        ).result()
        assert listed(gate) == {*before, *since, overwritten}
    files = place.files()
    done = place.restore()
    assert sorted(name_of(folder) for folder in done["unknown"]) == ["since", "twice", "v"]
    assert set(done["missing"]) == {gone, overwritten}
    assert place.files() >= files
    with running_gateway(place.folder, session_ttl=600) as gate, gate.service() as service:
        assert gate.gateway.collector.unknown == set(done["unknown"])
        assert listed(gate) == {*before, overwritten, gone}
        assert place.files() >= files
        service.create_training_client_from_state_with_optimizer(before[0]).result()
        _, trainer = gate.worker("trainer")
        assert trainer.step == 1
        client = service.create_sampling_client(model_path=before[1]).result()
        prompt = tinker.ModelInput.from_ints([1, 2])
        assert client.sample(prompt, 1, tinker.SamplingParams(max_tokens=2)).result().sequences
        with gate.http() as http:
            info = http.get(f"/api/v1/training_runs/{training.model_id}").json()
        assert info["training_run_id"] == training.model_id


def name_of(folder: str) -> str:
    """The checkpoint name of a folder, or "v" for a version."""
    leaf = folder.rpartition("/")[2]
    return "v" if folder.startswith("weights/") else leaf.rpartition("-")[0]


def test_a_version_that_got_its_name_after_the_backup_stays(place):
    with running_gateway(place.folder, session_ttl=600) as gate, gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        step(training)
        serving = training.save_weights_and_get_sampling_client().result()
        assert serving.get_base_model()
        place.back_up()
        training.save_weights_for_sampler("named").result()
    files = place.files()
    place.restore()
    for _ in range(2):
        with running_gateway(place.folder, session_ttl=600):
            assert place.files() >= files


def test_a_run_that_was_active_has_ended_and_says_why(place):
    with running_gateway(place.folder, session_ttl=600) as gate, gate.http() as client:
        run = gate.run_id(gate.session_id())
        place.back_up()
    place.restore()
    with running_gateway(place.folder, session_ttl=600) as gate, gate.http() as client:
        body = {"model_id": run, "seq_id": 1, "adam_params": {}}
        refused = client.post("/api/v1/optim_step", json=body)
        assert refused.status_code == 410, refused.text
        assert gate.run_id(gate.session_id())


def test_what_is_restored_is_refused_beside_a_gateway(place, monkeypatch):
    monkeypatch.delenv("TANDEM_LEADER_TIMEOUT")  # a gateway counts as alive for this time
    with running_gateway(place.folder, session_ttl=600) as gate:
        place.back_up()
        source = [] if url_for(place.data_dir) else [str(place.backup)]
        refused = place.tandem("restore", *source, ok=False)
        assert "gateway uses the data" in str(refused.exception)
        assert gate.run_id(gate.session_id())


@on_sqlite
def test_a_backup_beside_writes_is_of_one_moment_and_replaces_nothing_for_good(place):
    stop = threading.Event()
    with running_gateway(place.folder, session_ttl=600) as gate:
        first = gate.session_id()

        def create() -> None:
            while not stop.is_set():
                gate.session_id()

        creating = threading.Thread(target=create, daemon=True)
        creating.start()
        try:
            place.back_up()
        finally:
            stop.set()
            creating.join(60)
        assert "exists already" in str(
            place.tandem("backup", str(place.backup), ok=False).exception
        )
    with closing(sqlite3.connect(place.backup / "tandem.db")) as copy:
        assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert (first,) in copy.execute("SELECT id FROM sessions").fetchall()
    old = (place.data_dir / "tandem.db").read_bytes()
    replaced = Path(place.restore()["replaced"])
    assert (replaced / "tandem.db").read_bytes() == old


@on_sqlite
def test_what_is_no_backup_of_this_release_is_refused_and_changes_nothing(place):
    with running_gateway(place.folder, session_ttl=600):
        place.back_up()
    good = place.folder / "good"
    shutil.copytree(place.backup, good)
    shutil.copytree(place.data_dir, place.folder / "copy")

    def no_record() -> None:
        (place.backup / "backup.json").unlink()

    def damaged() -> None:
        (place.backup / "tandem.db").write_bytes(b"x" * 8192)

    def newer() -> None:
        with closing(sqlite3.connect(place.backup / "tandem.db", isolation_level=None)) as copy:
            copy.execute("UPDATE alembic_version SET version_num = '9999'")

    def without_a_database() -> None:
        (place.backup / "tandem.db").unlink()

    for spoil in (no_record, damaged, newer, without_a_database):
        shutil.rmtree(place.backup)
        shutil.copytree(good, place.backup)
        spoil()
        place.tandem("restore", str(place.backup), ok=False)
        assert not (place.data_dir / "replaced").exists(), spoil
        for file in (place.folder / "copy").glob("tandem.db*"):
            assert (place.data_dir / file.name).read_bytes() == file.read_bytes(), spoil


@on_sqlite
def test_a_directory_that_was_lost_but_for_the_weights_is_whole_again(place):
    """Restoring also puts back manifests."""
    with running_gateway(place.folder, session_ttl=600) as gate, gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        step(training)
        path = training.save_state("a").result().path
        place.back_up()
    (file,) = place.data_dir.glob("checkpoints/*/*/checkpoint.json")
    file.unlink()
    for file in place.data_dir.glob("tandem.db*"):
        file.unlink()
    assert place.restore()["missing"] == []
    with running_gateway(place.folder, session_ttl=600) as gate:
        assert listed(gate) == {path}


@on_sqlite
def test_after_a_restore_that_was_killed_no_gateway_starts_until_it_is_repeated(place, monkeypatch):
    with running_gateway(place.folder, session_ttl=600) as gate, gate.service() as service:
        path = service.create_lora_training_client("tiny:full").result().save_state("a").result()
        place.back_up()
        settings = gate.settings

    def move(source, target, moved=shutil.move):
        moved(source, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(shutil, "move", move)
        _replace_sqlite(place.backup, settings)
    assert not (place.data_dir / "tandem.db").exists()
    with pytest.raises(InvalidRequest, match="interrupted; repeat `tandem restore FOLDER`"):
        Database(url="", data_dir=place.data_dir)
    assert not (place.data_dir / "tandem.db").exists()
    place.restore()
    with running_gateway(place.folder, session_ttl=600) as gate:
        assert listed(gate) == {path.path}


@on_sqlite
def test_a_restore_without_room_for_the_copy_leaves_everything_as_it_was(place, monkeypatch):
    with running_gateway(place.folder, session_ttl=600) as gate, gate.service() as service:
        path = service.create_lora_training_client("tiny:full").result().save_state("a").result()
        place.back_up()
        settings = gate.settings

    def copyfile(_source, target):
        target.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full, pytest.raises(OSError, match="No space left"):
        full.setattr(shutil, "copyfile", copyfile)
        _replace_sqlite(place.backup, settings)
    assert [file.name for file in place.data_dir.glob(".partial-*")] == []
    with running_gateway(place.folder, session_ttl=600) as gate:
        assert listed(gate) == {path.path}
