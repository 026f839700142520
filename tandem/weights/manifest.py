"""The manifest of a weight version: `manifest.json`, written last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict

MANIFEST_NAME = "manifest.json"
PATCH_SUFFIX = ".patch"
_BLOCK_BYTES = 8 * 2**20


class FileEntry(BaseModel):
    """One file of a version.

    `checksum` is XXH3-128 in hexadecimal: fast, against damage and not against forgery.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    bytes: int
    checksum: str


class Canary(BaseModel):
    """Logprobs that the trainer computed with these weights, for an engine to reproduce.

    `tokens` [T] and `logprobs` [T-1], where `logprobs[i]` belongs to `tokens[i + 1]`; at
    temperature 1, in float32 from the trainer's compute type.
    """

    model_config = ConfigDict(frozen=True)

    tokens: list[int]
    logprobs: list[float]


class Manifest(BaseModel):
    """Literal example: `{"format": 1, "version": "s-ab12:train:0/v000003-9f2c41d0", "run_id":
    "s-ab12:train:0", "step": 48, "parent": "s-ab12:train:0/v000002-…", "dtype": "float32",
    "tensors": 46, "files": [{"name": "model-00001-of-00001.safetensors", …}], "canary": {…}}`.
    `parent` is the version before it; `operation` is the request_id of the operation that published
    it.

    A delta names in `delta_of` the whole version of its run that it was compared with, and in
    `patches` files such as "model.safetensors.patch". `files` and their checksums are those of the
    whole version all the same: a file that has a patch is not in the folder, and is what the patch
    makes of the file of that name of the other version.
    """

    model_config = ConfigDict(frozen=True)

    format: int = 1
    version: str
    run_id: str
    step: int
    parent: str = ""
    operation: str = ""
    adapter: bool = False
    dtype: str
    tensors: int
    created: str
    files: list[FileEntry]
    canary: Canary | None = None
    delta_of: str = ""
    patches: list[FileEntry] = []

    @property
    def bytes(self) -> int:
        """Of all files as a reader has them, patched."""
        return sum(entry.bytes for entry in self.files)

    @property
    def written(self) -> list[FileEntry]:
        """What is in the folder."""
        patched = {entry.name.removesuffix(PATCH_SUFFIX) for entry in self.patches}
        return [*(entry for entry in self.files if entry.name not in patched), *self.patches]

    @property
    def written_bytes(self) -> int:
        return sum(entry.bytes for entry in self.written)


class Checksum:
    """Size and checksum of a file, from its content piece by piece: as it is read, or written."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._bytes = 0

    def update(self, content: bytes | memoryview) -> None:
        """Take the next piece, a `memoryview` of bytes."""
        self._digest.update(content)
        self._bytes += len(content)

    def entry(self, name: str) -> FileEntry:
        return FileEntry(name=name, bytes=self._bytes, checksum=self._digest.hexdigest())


def checksum_file(path: Path, go_on: Callable[[], None] = lambda: None) -> FileEntry:
    """Read the file once; return its size and checksum. `go_on` is called before each block."""
    checksum = Checksum()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            go_on()
            checksum.update(block)
    return checksum.entry(path.name)
