"""Checkpoints in a database and on disk, without the rest of a gateway."""

from __future__ import annotations

import json
import time
from pathlib import Path

from gateway.checkpoints.catalog import Checkpoint, CheckpointCatalog
from gateway.checkpoints.collector import GarbageCollector
from gateway.checkpoints.pins import Pins
from gateway.checkpoints.versions import VersionStore
from gateway.identifiers import parse_checkpoint_path
from gateway.metrics import Metrics
from gateway.owners.limits import Quotas
from gateway.storage.database import Database
from tandem.settings.requests import LimitSettings
from tests.support.postgres import url_for

RUN = "s-1:train:0"
PATH = f"tinker://{RUN}/weights/a"
DAY = 86_400.0


class Store:
    """`url` names the database, if it is not the directory's own."""

    def __init__(
        self,
        data_dir: Path,
        *,
        collector=GarbageCollector,
        url: str = "",
        private_dir: Path | None = None,
    ) -> None:
        self.data_dir = data_dir
        self.database = Database(url=url or url_for(data_dir), data_dir=data_dir)
        self.checkpoints = CheckpointCatalog(
            database=self.database,
            pins=Pins(),
            limits=Quotas(settings=LimitSettings(), metrics=Metrics()),
            expiry_grace=DAY,
        )
        self.versions = VersionStore(database=self.database, data_dir=data_dir, min_free_bytes=0)
        self.collector = collector(
            database=self.database,
            data_dir=data_dir,
            private_dir=private_dir or data_dir,
            checkpoints=self.checkpoints,
        )

    def reading(self, path: str):
        return self.checkpoints.reading(path, readers=None)

    def trash(self) -> list[Path]:
        return list(self.data_dir.glob("*/.trash/*"))


def folder(store, relative: str) -> Path:
    """Make a folder without a list of its files."""
    path = store.data_dir / relative
    path.mkdir(parents=True)
    (path / "file").write_text("content")
    return path


def whole(store, relative: str) -> Path:
    path = folder(store, relative)
    entry = {"name": "file", "bytes": 7, "checksum": ""}
    (path / "checkpoint.json").write_text(json.dumps({"step": 0, "files": [entry]}))
    return path


def checkpoint(store, relative: str, *, path: str = PATH, **changes) -> Checkpoint:
    state = relative.startswith("checkpoints")
    values = {
        "path": parse_checkpoint_path(path),
        "base_model": "tiny",
        "folder": relative if state else "",
        "version": "" if state else f"{RUN}/{relative.rpartition('/')[2]}",
        "step": 0,
        "bytes": 7,
        "optimizer": True,
        "created_at": time.time(),
        "owner": "local",
    }
    return Checkpoint(**(values | changes))
