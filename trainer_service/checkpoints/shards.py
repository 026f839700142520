"""The files of a checkpoint: safetensors, written and read through torch's distributed checkpoint.

torch plans which rank writes and reads which part. torch's own files are pickles, which can call
any function of the reader. In ours, each file's header says everything: a shard's type, shape and
place, and its part of the tensor.

Example: `model.embed_tokens.weight@64,0` is the part of that parameter from row 64 on. A
part that starts at the origin has only the tensor's name.

`read_layout` reads only headers and trusts nothing in them. Ranks trust each other and exchange
plans as pickles."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tandem.errors import CheckpointDamaged, InvalidRequest, describe
from tandem.weights import FileEntry
from tandem.weights.layout import TensorWriter
from tandem.weights.store import check_own_file, read_again
from tandem.weights.tensors import STORED_TYPES, StoredTensor, read_header
from trainer_service.checkpoints.storage import FILE_BYTES, ByteCount, HashedFile, together

_FILE_TENSORS = 2**16
"""The most tensors of one file, so that its header stays small."""
_PIECE = 8 * 2**20
_DTYPES = {
    stored: getattr(torch, name.removeprefix("torch.")) for name, stored in STORED_TYPES.items()
}
_KEY = re.compile(r"(?P<tensor>[^@]+)(?:@(?P<offsets>[0-9]{1,19}(?:,[0-9]{1,19})*))?")


@dataclass(frozen=True)
class Shard:
    offsets: tuple[int, ...]
    place: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape


@dataclass(frozen=True)
class SavedTensor:
    """The `shards` cover the tensor without overlap."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[Shard, ...]


Layout = Mapping[str, SavedTensor]
"""The tensors of a checkpoint, by name."""


# --- Reading --------------------------------------------------------------------------------------


def read_layout(folder: Path, *, files: Collection[str]) -> Layout:
    """Read the tensors in these files of a checkpoint.

    Raises `CheckpointDamaged` for a file outside the folder, or incomplete tensors."""
    shards: defaultdict[str, list[Shard]] = defaultdict(list)
    try:
        for name in files:
            header = read_again(partial(_read_own_header, folder, name), folder / name)
            for place in header.values():
                tensor, shard = _shard(place)
                shards[tensor].append(shard)
        return {tensor: _whole(tensor, parts) for tensor, parts in shards.items()}
    except OSError as error:
        raise CheckpointDamaged(
            f"checkpoint {folder.name} cannot be read: {describe(error)}"
        ) from error
    except (InvalidRequest, ValueError) as error:
        raise CheckpointDamaged(
            f"checkpoint {folder.name} is damaged: {describe(error)}; load another checkpoint"
        ) from error


def _read_own_header(folder: Path, name: str, _: Path) -> Mapping[str, StoredTensor]:
    return read_header(check_own_file(folder, name))


def _shard(place: StoredTensor) -> tuple[str, Shard]:
    found = _KEY.fullmatch(place.name)
    if found is None or place.dtype not in _DTYPES:
        raise ValueError(f"{place.name[:100]!r} ({place.dtype[:20]}) is no part of a checkpoint")
    text = found["offsets"]
    offsets = tuple(map(int, text.split(","))) if text else (0,) * len(place.shape)
    if len(offsets) != len(place.shape):
        raise ValueError(f"{place.name[:100]!r} has {len(place.shape)} dimensions")
    return found["tensor"], Shard(offsets=offsets, place=place)


def _whole(name: str, shards: Sequence[Shard]) -> SavedTensor:
    """Return the tensor with these parts, which must be the cells of a grid."""
    kinds = {(shard.place.dtype, len(shard.shape)) for shard in shards}
    if len(kinds) > 1:
        raise ValueError(f"the parts of {name[:100]!r} do not belong together")
    [(dtype, dimensions)] = kinds
    shape = []
    for dimension in range(dimensions):
        spans = {(shard.offsets[dimension], shard.shape[dimension]) for shard in shards}
        end = 0
        for start, size in sorted(spans):
            if start != end:
                raise ValueError(f"the parts of {name[:100]!r} leave a gap or overlap")
            end += size
        shape.append(end)
    places = {shard.offsets for shard in shards}
    elements = sum(math.prod(shard.shape) for shard in shards)
    if len(places) < len(shards) or elements != math.prod(shape):
        raise ValueError(f"{name[:100]!r} is not whole")
    return SavedTensor(shape=tuple(shape), dtype=_DTYPES[dtype], shards=tuple(shards))


class ShardReader(StorageReader):  # type: ignore[misc]
    """Reads the shards in `files` that a rank needs. The ranks of `group` wait for each other."""

    def __init__(
        self, folder: Path, *, files: Collection[str], group: dist.ProcessGroup | None = None
    ) -> None:
        self._folder = folder
        self._files = files
        self._group = group
        self._shards: dict[tuple[str, tuple[int, ...]], Shard] = {}
        self._progress = ByteCount()

    def reset(self, checkpoint_id: object = None) -> None:
        """Does nothing: a reader reads one checkpoint, once."""

    def read_metadata(self) -> Metadata:
        layout = read_layout(self._folder, files=self._files)
        self._shards = {
            (name, shard.offsets): shard
            for name, tensor in layout.items()
            for shard in tensor.shards
        }
        return Metadata({name: _described(tensor) for name, tensor in layout.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Does nothing: `read_metadata` has found everything."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: defaultdict[Path, list[tuple[Shard, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            index = item.storage_index
            shard = self._shards[index.fqn, tuple(index.offset)]
            wanted[shard.place.file].append((shard, item))

        def read() -> None:
            for file, items in wanted.items():
                items.sort(key=lambda each: each[0].place.start)
                read_again(partial(self._read, items, planner), file)

        done: Future[None] = Future()
        done.set_result(together(self._group, read, progress=self._progress))
        return done

    def _read(
        self, items: Sequence[tuple[Shard, ReadItem]], planner: LoadPlanner, file: Path
    ) -> None:
        with file.open("rb") as stream:
            for shard, item in items:
                piece = self._rows(stream, shard, item)
                target = planner.resolve_tensor(item).detach()
                target.copy_(piece)
                planner.commit_tensor(item, target)

    def _rows(self, stream: BinaryIO, shard: Shard, item: ReadItem) -> Tensor:
        """Read the needed part of a shard, in pieces, so that a slow disk shows progress."""
        shape, start = list(shard.shape), shard.place.start
        if shape:
            row = shard.place.bytes // max(1, shape[0])
            start += item.storage_offsets[0] * row
            shape[0] = item.lengths[0]
        rows = torch.empty(shape, dtype=_DTYPES[shard.place.dtype])
        content = _content(rows)
        stream.seek(start)
        done = 0
        while done < len(content):
            read = stream.readinto(content[done : done + _PIECE])  # type: ignore[attr-defined]
            if not read:
                raise OSError(f"{shard.place.file.name} ends within {shard.place.name}")
            done += read
            self._progress.bytes += read
        for dimension in range(1, len(shape)):
            rows = rows.narrow(dimension, item.storage_offsets[dimension], item.lengths[dimension])
        return rows

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return False


def _described(tensor: SavedTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=tensor.dtype),
        size=torch.Size(tensor.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(shard.offsets), sizes=torch.Size(shard.shape))
            for shard in tensor.shards
        ],
    )


def _content(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous host tensor, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


# --- Writing --------------------------------------------------------------------------------------


class _Results(list[WriteResult]):
    """One rank's results for the first rank. torch requires a list, which nobody reads."""

    def __init__(self, files: list[FileEntry]) -> None:
        super().__init__()
        self.files = files


class ShardWriter(StorageWriter):  # type: ignore[misc]
    """Writes a rank's shards into files of bounded size, and syncs them.

    The ranks of `group` wait for each other. Then `files` lists all ranks' files on the first rank.
    """

    def __init__(self, folder: Path, *, group: dist.ProcessGroup | None) -> None:
        self.files: list[FileEntry] = []
        self._folder = folder
        self._group = group
        self._progress = ByteCount()

    def reset(self, checkpoint_id: object = None) -> None:
        """Does nothing: a writer writes one checkpoint, once."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        rank = 0 if self._group is None else dist.get_rank(self._group)

        def write() -> list[FileEntry]:
            return [
                self._write(f"rank-{rank}-{number}.safetensors", items, planner)
                for number, items in enumerate(_divided(plan.items))
            ]

        done: Future[list[WriteResult]] = Future()
        done.set_result(_Results(together(self._group, write, progress=self._progress)))
        return done

    def _write(self, name: str, items: Mapping[str, WriteItem], planner: SavePlanner) -> FileEntry:
        writer = TensorWriter(
            {
                key: StoredTensor(
                    file=Path(name),
                    name=key,
                    dtype=STORED_TYPES[str(item.tensor_data.properties.dtype)],
                    shape=tuple(item.tensor_data.chunk.sizes),
                    start=place,
                    bytes=_bytes(item),
                )
                for place, (key, item) in enumerate(items.items())
            }
        )
        with closing(HashedFile(self._folder / name, progress=self._progress)) as file:
            file.write(writer.header)
            for key in writer.order:
                tensor = planner.resolve_data(items[key])
                content = _content(tensor.detach().cpu().contiguous())
                assert len(content) == _bytes(items[key])
                file.write(content)
            file.sync()
        return file.entry()

    def finish(self, metadata: Metadata, results: list[_Results]) -> None:
        self.files = [entry for each in results for entry in each.files]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return False


def _divided(items: Sequence[WriteItem]) -> Iterator[dict[str, WriteItem]]:
    """Yield the items of each file, by their names there. Empty parts are left out."""
    file: dict[str, WriteItem] = {}
    size = 0
    for item in items:
        assert item.type != WriteItemType.BYTE_IO, "a state consists of tensors"
        if not _bytes(item) and math.prod(item.tensor_data.size):
            continue
        if file and (size + _bytes(item) > FILE_BYTES or len(file) == _FILE_TENSORS):
            yield file
            file, size = {}, 0
        offsets = item.tensor_data.chunk.offsets
        place = f"@{','.join(map(str, offsets))}" if any(offsets) else ""
        file[item.index.fqn + place] = item
        size += _bytes(item)
    if file:
        yield file


def _bytes(item: WriteItem) -> int:
    dtype: torch.dtype = item.tensor_data.properties.dtype
    return int(math.prod(item.tensor_data.chunk.sizes) * dtype.itemsize)
