"""Reads torch's distributed checkpoints without trusting their contents.

torch describes the layout of a checkpoint in a pickled `.metadata`, and a pickle can call any
function by name. This reader allows only the few classes that such a layout consists of, and
only files of the checkpoint itself. torch reads the tensors with `weights_only`, which restricts
their pickles likewise.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.futures import Future

from tandem.errors import CheckpointDamaged, describe
from tandem.weights.store import read_again
from trainer_service.checkpoints.storage import ByteCount, together

LAYOUT_NAME = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = frozenset(
    {
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
    }
)
"""The layout of plain tensors: data without behaviour, and one lookup by name."""
_RENAMED = {"pathlib._local": "pathlib"}
"""Modules that a version of Python (here 3.13) has under a name of its own, and their names."""
_MOST_BYTES = 512 * 2**20
_PIECE = 8 * 2**20


class _LayoutUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        module = _RENAMED.get(module, module)
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint's layout")


def _member(kind: object, name: str) -> Enum:
    """Return a member of an enumeration: Python 3.11.0 to 3.11.3 write one as `getattr` with its
    class and its name, and others by its value."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError("builtins.getattr is allowed for members of enumerations only")
    return kind[name]


class _CountedFile(io.BufferedReader):
    """A file that is read in pieces, so that a large tensor on a slow disk is no standstill."""

    def __init__(self, path: Path, *, progress: ByteCount) -> None:
        super().__init__(io.FileIO(path))
        self._progress = progress

    def readinto(self, buffer: Any) -> int:
        whole, done = memoryview(buffer).cast("B"), 0
        while read := super().readinto(whole[done : done + _PIECE]):
            done += read
            self._progress.bytes += read
        return done


class _CountedFiles(FileSystem):  # type: ignore[misc]
    """The files that a rank reads."""

    def __init__(self) -> None:
        self.progress = ByteCount()

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator[IO[bytes]]:
        assert mode == "rb", "nothing is written through a reader"
        with _CountedFile(path, progress=self.progress) as stream:
            yield stream


class CheckpointReader(FileSystemReader):  # type: ignore[misc]
    """Reads only `files`, the names in the checkpoint's record. The ranks of the `group` wait for
    each other while they do."""

    def __init__(
        self, path: Path, *, files: Collection[str], group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(path)
        self.fs = _CountedFiles()
        self._folder = path
        self._files = frozenset(files)
        self._group = group

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        def read() -> Future[None]:
            return super(CheckpointReader, self).read_data(plan, planner)

        return together(self._group, read, progress=self.fs.progress)

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        layout = read_layout(self._folder, files=self._files)
        if layout.storage_meta is None:
            layout.storage_meta = StorageMeta()
        layout.storage_meta.load_id = self.load_id
        return layout


def read_layout(folder: Path, *, files: Collection[str]) -> Metadata:
    """Reads the layout. Raises `CheckpointDamaged` if it has anything but tensors in `files`."""
    try:
        layout = read_again(_unpickle, folder / LAYOUT_NAME)
    except OSError as error:
        raise CheckpointDamaged(
            f"checkpoint {folder.name} cannot be read: {describe(error)}"
        ) from error
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointDamaged(
            f"the layout of checkpoint {folder.name} is damaged: {describe(error)}"
        ) from error
    if not isinstance(layout, Metadata) or not isinstance(layout.storage_data, dict):
        raise CheckpointDamaged(f"the layout of checkpoint {folder.name} is of another kind")
    places = {getattr(place, "relative_path", None) for place in layout.storage_data.values()}
    if odd := [place for place in places if place not in files]:
        raise CheckpointDamaged(
            f"the layout of checkpoint {folder.name} points at {str(odd[0])[:100]!r}, "
            "which is not one of its files"
        )
    kinds = layout.state_dict_metadata.values()
    if not all(isinstance(kind, TensorStorageMetadata) for kind in kinds):
        raise CheckpointDamaged(f"checkpoint {folder.name} holds something other than tensors")
    return layout


def _unpickle(path: Path) -> object:
    with path.open("rb") as file:
        if file.seek(0, 2) > _MOST_BYTES:
            raise pickle.UnpicklingError("it is too large")
        file.seek(0)
        return _LayoutUnpickler(file).load()
