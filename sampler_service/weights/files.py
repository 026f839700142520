"""The safetensors files of a model's directory, with their patches where it holds a delta.

A delta is read from two directories: its own, and that of the whole version that it was compared
with (`tandem.weights.delta`). A tensor that has changed is copied from the file of the latter, and
its changes are put in; no more than one tensor is copied at a time. What was made while a version
was verified is kept, where there is room (`made_files`), and loaded as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from safetensors import safe_open

from sampler_service.weights.made_files import MadeFiles
from tandem.errors import LoadFailed
from tandem.weights import Checksum, Manifest, open_base
from tandem.weights.delta import Bytes, Patch
from tandem.weights.manifest import MANIFEST_NAME, PATCH_SUFFIX
from tandem.weights.store import check_own_file, read_again

if TYPE_CHECKING:
    import torch

NOTHING_MADE: Mapping[str, Bytes] = MappingProxyType({})


@dataclass(frozen=True)
class WeightsFile:
    """`path` is a file of safetensors; with a `patch`, that of the version which was compared;
    `made` is what the patch makes of it, if that was kept."""

    path: Path
    patch: Path | None = None
    made: Bytes | None = None

    def tensors(self, room: Bytes | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and values of its tensors in the order of the file. What a patch makes is
        put into its place in `room`, if that is given. Raises `OSError`, or `LoadFailed` for a
        patch that does not fit the file."""
        import torch

        with safe_open(self.path, framework="pt", device="cpu") as file:
            if self.patch is None:
                for name in file.offset_keys():
                    yield name, file.get_tensor(name)
                return
            place = len(header_of(self.path))
            if self.made is not None:
                for name in file.offset_keys():
                    tensor = file.get_tensor(name)  # which is not read from the disk
                    content = self.made[place : place + tensor.nbytes]
                    yield name, torch.from_numpy(content).view(tensor.dtype).view(tensor.shape)
                    place += tensor.nbytes
                return
            try:
                patch = Patch.open(self.patch)
                for name in file.offset_keys():
                    tensor = file.get_tensor(name)
                    size = tensor.nbytes
                    changes = patch.within(place, size)
                    if changes or room is not None:
                        # Torch's threads would wait for one another at each tensor, and on busy
                        # cores long.
                        content = bytes_of(tensor).numpy()
                        if room is None:
                            content = content.copy()
                        else:
                            room[place : place + size] = content
                            content = room[place : place + size]
                        for change in changes:
                            change.apply(content, start=place)
                        tensor = torch.from_numpy(content).view(tensor.dtype).view(tensor.shape)
                    yield name, tensor
                    place += size
            except ValueError as error:
                raise LoadFailed(
                    f"{self.patch.parent.name}/{self.patch.name} is damaged: {error}"
                ) from error


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as its bytes, not copied."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def header_of(file: Path) -> bytes:
    """Return what a safetensors file has before its tensors, the length of that included."""
    with file.open("rb") as stream:
        length = stream.read(8)
        return length + stream.read(int.from_bytes(length, "little"))


def weights_files(directory: Path) -> list[WeightsFile]:
    """Return the safetensors files that make up a model's directory. Raises `LoadFailed` for a
    delta without the version that it is a delta of, `OSError` without one of that one's files."""
    manifest = _manifest_of(directory)
    if manifest is None or not manifest.delta_of:
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


def read_tensors(
    directory: Path, made: Mapping[str, Bytes] = NOTHING_MADE
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and value of every tensor in a directory's files, of which some may have been
    `made` of their patches already."""
    for file in weights_files(directory):
        yield from replace(file, made=made.get(file.path.name)).tensors()


def verified_tensors(
    directory: Path, manifest: Manifest, go_on: Callable[[], None], made: MadeFiles | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """As `read_tensors`, of a version whose own files are verified: what the patches make is
    compared with the checksums, and kept in `made`. Whoever takes all has read what was published.

    Raises `LoadFailed` that names the file which is damaged, `OSError`, and what `go_on` does.
    """
    entries = {entry.name: entry for entry in manifest.files}
    for file in weights_files(directory):
        if file.patch is None:
            yield from file.tensors()
            continue
        checksum = Checksum()
        checksum.update(header_of(file.path))
        name, size = file.path.name, entries[file.path.name].bytes
        room = made.make(name, size) if made is not None else None
        for name, tensor in file.tensors(room):
            go_on()
            checksum.update(memoryview(bytes_of(tensor).numpy()))
            yield name, tensor
        if checksum.entry(file.path.name) != entries[file.path.name]:
            base_of(directory, manifest, checksums=True, go_on=go_on)
            raise LoadFailed(
                f"{manifest.version}: {file.patch.name} does not make what was published out of "
                f"{manifest.delta_of}"
            )


def base_of(
    directory: Path,
    manifest: Manifest,
    *,
    checksums: bool,
    go_on: Callable[[], None] = lambda: None,
) -> Path:
    """Return the directory of what a delta is a delta of. Raises `LoadFailed` that names both."""
    try:
        return open_base(directory, manifest.delta_of, checksums=checksums, go_on=go_on)
    except LoadFailed as error:
        raise LoadFailed(
            f"{manifest.version} holds changes of {manifest.delta_of}, which cannot be read: "
            f"{error.message}"
        ) from error


def _manifest_of(directory: Path) -> Manifest | None:
    """Return None for a model that was not published."""
    file = directory / MANIFEST_NAME
    try:
        return Manifest.model_validate_json(read_again(Path.read_bytes, file))
    except FileNotFoundError:
        return None
