"""The manifest of a weight version: `manifest.json`, written last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict

MANIFEST_NAME = "manifest.json"
_BLOCK_BYTES = 2**20


class FileEntry(BaseModel):
    """One file of a version. `checksum` is XXH3-128 in hexadecimal, against damage but not
    forgery."""

    model_config = ConfigDict(frozen=True)

    name: str
    bytes: int
    checksum: str


class Canary(BaseModel):
    """The trainer's logprobs with these weights, which an engine must reproduce.

    `logprobs` [T-1] belong to `tokens[1:]` of `tokens` [T]. They are at temperature 1, in float32.
    """

    model_config = ConfigDict(frozen=True)

    tokens: list[int]
    logprobs: list[float]


class Manifest(BaseModel):
    """Example: `{"format": 1, "version": "s-ab12:train:0/v000003-9f2c41d0", "run_id":
    "s-ab12:train:0", "step": 48, "parent": "s-ab12:train:0/v000002-…", "dtype": "float32",
    "tensors": 46, "sums": {"model.norm.weight": 8151…, …}, "files": [{"name":
    "model-00001-of-00001.safetensors", …}], "canary": {…}}`.

    `sums` has the sum (`tandem.weights.sums`) of each floating tensor in `dtype`, taken from the
    trainer's memory. Adapters and older versions have none. `parent` is the previous version,
    `operation` the request_id of the publishing operation."""

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
    sums: dict[str, int] = {}
    created: str
    files: list[FileEntry]
    canary: Canary | None = None

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files)


class Checksum:
    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._bytes = 0

    def update(self, content: bytes | memoryview) -> None:
        """A `memoryview` must be of bytes."""
        self._digest.update(content)
        self._bytes += len(content)

    def entry(self, name: str) -> FileEntry:
        return FileEntry(name=name, bytes=self._bytes, checksum=self._digest.hexdigest())


def checksum_file(path: Path, go_on: Callable[[], None] = lambda: None) -> FileEntry:
    """`go_on` is called before each block."""
    checksum, block = Checksum(), memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            go_on()
            checksum.update(block[:size])
    return checksum.entry(path.name)
