from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gateway.admin.backup import back_up
from gateway.checkpoints.versions import FILE_LISTS
from tandem.errors import InvalidRequest
from tandem.settings.gateway import GatewaySettings


@pytest.mark.parametrize("when", ["before", "after"])
def test_versions_that_are_removed_during_a_backup_are_not_in_it(tmp_path, monkeypatch, when):
    """Two runs have a version each. One run is removed as the first version is copied."""
    data_dir, copy = tmp_path / "data", shutil.copyfile
    files = {data_dir / "weights" / run / "1" / FILE_LISTS[-1] for run in "ab"}
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    copied: list[Path] = []

    def copy_and_remove(source: Path, target: Path) -> None:
        if when == "after":
            copy(source, target)
        if not copied:
            gone = source if when == "before" else (files - {source}).pop()
            shutil.rmtree(gone.parents[1])
        copied.append(source)
        if when == "before":
            copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", copy_and_remove)
    settings = GatewaySettings(data_dir=data_dir, database_url="postgresql://host/name")
    about = back_up(tmp_path / "backup", settings)
    kept = [path for path in (tmp_path / "backup" / "manifests").rglob("*") if path.is_file()]
    assert (about.folders, len(kept)) == (1, 1)


def test_a_backup_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(InvalidRequest, match="there is no database"):
        back_up(tmp_path / "backups" / "monday", GatewaySettings(data_dir=tmp_path / "data"))
    assert list((tmp_path / "backups").iterdir()) == []


@pytest.mark.parametrize(
    ("place", "why"), [(0, "cannot be copied: file is not a database"), (2, "is damaged")]
)
def test_a_damaged_database_is_named_and_not_its_copy(tmp_path, place, why):
    file = tmp_path / "tandem.db"
    with closing(sqlite3.connect(file)) as database:
        database.execute("CREATE TABLE alembic_version (version_num)")
        database.execute("INSERT INTO alembic_version VALUES ('0001_first')")
        database.execute("CREATE TABLE other (number)")
        database.commit()
        (size,) = database.execute("PRAGMA page_size").fetchone()
    with file.open("r+b") as damaged:
        damaged.seek(place * size)
        damaged.write(b"x" * size)
    with pytest.raises(InvalidRequest, match=f"{file} {why}"):
        back_up(tmp_path / "backup", GatewaySettings(data_dir=tmp_path))
