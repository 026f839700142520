"""The safetensors files of a model's directory, with the patches of a delta.

A delta is read from its own directory and its base version's (`tandem.weights.delta`). Changed
tensors are copied from the base's file and patched, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import safe_open

from tandem.errors import LoadFailed, describe
from tandem.weights import Checksum, Manifest, open_base
from tandem.weights.delta import Bytes, Patch
from tandem.weights.manifest import MANIFEST_NAME, PATCH_SUFFIX
from tandem.weights.model_config import model_files
from tandem.weights.store import check_own_file, read_record

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class TensorSource:
    """A tensor of a file, its `stored` value and the `patch` that changes it. `place` is its
    offset."""

    name: str
    stored: torch.Tensor
    place: int = 0
    patch: Patch | None = None
    patch_file: Path | None = None

    def tensor(self) -> torch.Tensor:
        """Return the value, copied if the patch changes it. Raises `LoadFailed`."""
        if self.patch is None or not self.patch.within(self.place, self.stored.nbytes):
            return self.stored
        import torch

        content = np.empty(self.stored.nbytes, np.uint8)
        self.write_bytes(content)
        return torch.from_numpy(content).view(self.stored.dtype).view(self.stored.shape)

    def write_bytes(self, target: Bytes, start: int = 0) -> None:
        """Write the bytes of the value from `start` on, a multiple of `PIECE_BYTES`. Raises
        `LoadFailed`."""
        # NumPy copies here: torch's threads would wait for one another at each tensor.
        np.copyto(target, bytes_of(self.stored).numpy()[start : start + target.size])
        if self.patch is None:
            return
        assert self.patch_file is not None
        begin = self.place + start
        with damage_named(self.patch_file):
            for change in self.patch.within(begin, target.size):
                change.apply(target, start=begin)


@dataclass(frozen=True)
class WeightsFile:
    """A safetensors file. A `patch` changes it into a file of a newer version."""

    path: Path
    patch: Path | None = None

    def sources(self) -> Iterator[TensorSource]:
        """Yield the file's tensors in order. Raises `OSError`, and `LoadFailed` for a damaged
        patch."""
        patch, place = None, 0
        if self.patch is not None:
            place = len(header_of(self.path))
            with damage_named(self.patch):
                patch = Patch.open_patch(self.patch)
        with safe_open(self.path, framework="pt", device="cpu") as file:
            for name in file.offset_keys():
                source = TensorSource(name, file.get_tensor(name), place, patch, self.patch)
                yield source
                place += source.stored.nbytes


@contextmanager
def damage_named(patch: Path) -> Iterator[None]:
    """Raise `LoadFailed` in place of a patch's `ValueError`."""
    try:
        yield
    except ValueError as error:
        raise LoadFailed(
            f"{patch.parent.name}/{patch.name} is damaged: {describe(error)}"
        ) from error


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, without a copy."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def header_of(file: Path) -> bytes:
    """Return the header of a safetensors file, with its length field."""
    with file.open("rb") as stream:
        length = stream.read(8)
        return length + stream.read(int.from_bytes(length, "little"))


def weights_files(directory: Path) -> list[WeightsFile]:
    """Return the safetensors files of a model's directory.

    Raises `LoadFailed` for a delta without its base, and `OSError` for a missing file."""
    manifest = manifest_of(directory)
    if manifest is None:
        return [WeightsFile(path) for path in model_files(directory)]
    if not manifest.delta_of:
        return [WeightsFile(path) for path in sorted(directory.glob("*.safetensors"))]
    base = base_of(directory, manifest, checksums=False)
    patches = {entry.name for entry in manifest.patches}
    names = [e.name for e in manifest.files if e.name.endswith(".safetensors")]
    return [
        WeightsFile(check_own_file(base, name), directory / patch)
        if (patch := name + PATCH_SUFFIX) in patches
        else WeightsFile(directory / name)
        for name in sorted(names)
    ]


def read_sources(directory: Path) -> Iterator[TensorSource]:
    """Yield all tensors of a directory. Raises `OSError` and `LoadFailed`."""
    for file in weights_files(directory):
        yield from file.sources()


def read_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Like `read_sources`, as names and values."""
    return ((source.name, source.tensor()) for source in read_sources(directory))


def verified_tensors(
    file: WeightsFile, manifest: Manifest | None, go_on: Callable[[], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and values of a file's tensors. The version's own files must be verified.

    The result of a patch is compared with its checksum. Raises `LoadFailed` that names the damaged
    file, `OSError`, and the errors of `go_on`."""
    if file.patch is None:
        yield from ((source.name, source.stored) for source in file.sources())
        return
    assert manifest is not None, "only a version has patches"
    (entry,) = (entry for entry in manifest.files if entry.name == file.path.name)
    checksum = Checksum()
    checksum.update(header_of(file.path))
    for source in file.sources():
        go_on()
        tensor = source.tensor()
        checksum.update(memoryview(bytes_of(tensor).numpy()))
        yield source.name, tensor
    if checksum.entry(entry.name) != entry:
        base_of(file.patch.parent, manifest, checksums=True, go_on=go_on)
        raise LoadFailed(
            f"{manifest.version}: the changes in {file.patch.name} do not turn "
            f"{manifest.delta_of} into the published weights"
        )


def base_of(
    directory: Path,
    manifest: Manifest,
    *,
    checksums: bool,
    go_on: Callable[[], None] = lambda: None,
) -> Path:
    """Return the directory of a delta's base version. Raises `LoadFailed` that names both."""
    try:
        return open_base(directory, manifest.delta_of, checksums=checksums, go_on=go_on)
    except LoadFailed as error:
        raise LoadFailed(
            f"{manifest.version} holds changes of {manifest.delta_of}, which cannot be read: "
            f"{error.message}"
        ) from error


def manifest_of(directory: Path) -> Manifest | None:
    file = directory / MANIFEST_NAME
    try:
        return Manifest.model_validate_json(read_record(file))
    except FileNotFoundError:
        return None
