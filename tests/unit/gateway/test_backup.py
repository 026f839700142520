from __future__ import annotations

import shutil
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
