"""Replaces an engine's weights: verify, load in place, check, compare, and only then serve.

While the engine still samples from the old weights (`read_ahead`): the manifest and its checksums,
for which all files are read, and the names, shapes and dtypes of all tensors. Once it has drained:
the load, after which every parameter of the engine has got a value, the engine holds the numbers of
the files and no others (`sums`), the prefix cache is empty, and the engine computes the logprobs
that the trainer recorded when it published (the canary). The sums tell versions apart that differ
in a single bit, but not what lies where; the canary does, as far as its tolerance goes. A base
model has neither manifest nor canary; the rest applies to it, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open

from sampler_service.engine import Engine, EngineFacts, Float32Array, WeightsTouched
from sampler_service.weights.files import (
    WeightsFile,
    read_tensors,
    verified_tensors,
    weights_files,
)
from sampler_service.weights.staging import staging_threads
from tandem.errors import LoadFailed, describe, without_paths
from tandem.telemetry import get_log
from tandem.v1 import common_pb2
from tandem.weights import Canary, Manifest, checksum_file, open_version
from tandem.weights.model_config import model_files, text_config
from tandem.weights.store import in_threads, read_again
from tandem.weights.sums import WeightSums, added_up, differing, file_sums, sums_of

if TYPE_CHECKING:
    import torch

_BASE_PREFIX = "base/"
_FLOATING = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class WeightVersion:
    """A weight version as a request names it. Versions of one name are equal. An `adapter` is
    computed beside the base model's weights. With a `handoff`, the files need not be read."""

    name: str
    path: Path
    run_id: str = ""
    step: int = 0
    adapter: bool = False
    handoff: common_pb2.Handoff | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeightVersion) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def is_base(self) -> bool:
        return self.name.startswith(_BASE_PREFIX)


@dataclass(frozen=True)
class LoadOutcome:
    """A load that succeeded. `seconds` are those in which the engine could not sample;
    `canary_difference` is NaN without a canary. Its weights were `handed_off`, or read from files:
    `handoff_failure` says why, if they should have been."""

    version: WeightVersion
    bytes: int
    seconds: float
    canary_difference: float
    handed_off: bool = False
    handoff_failure: str = ""


@dataclass(frozen=True)
class Verified:
    """A version whose files are whole and fit the engine. `sums` are those of its numbers, if the
    engine can be compared with them; `seconds` is how long it was read.

    If the version has a `handoff`, this is what is loaded, and no file was read. If that cannot be,
    it has none any more, and `handoff_failure` says why."""

    version: WeightVersion
    canary: Canary | None = None
    sums: WeightSums | None = None
    bytes: int = 0
    seconds: float = 0.0
    handoff_failure: str = ""


class Loader:
    """Loads versions into one engine: `verify` needs no engine, `place` the weights' memory,
    `confirm` the KV cache as well. `base`, which the engine was started with, says which tensors a
    version must have."""

    def __init__(self, engine: Engine, *, base: Path, tolerance: float) -> None:
        """The engine holds the weights of `base`. `tolerance` is the largest logprob difference
        that a canary may show."""
        self._engine = engine
        self._base = base
        self._facts = engine.facts
        self._tied = is_tied(base)
        self._expected = loadable(read_inventory(base), tied=self._tied)
        self._tolerance = tolerance
        self._base_sums = engine.weight_sums()
        self._adds_up = True
        # Samples of a GPU leave the host's cores to this; on a CPU they need them.
        self._threads = staging_threads(self._facts.device, workers=1) or 1

    def verify(self, version: WeightVersion, go_on: Callable[[], None]) -> Verified:
        """Read all files of a version, in any thread; `go_on` is called before each piece, and ends
        it by raising. Raises `LoadFailed`."""
        if version.handoff is None:
            return self._read_files(version, go_on)
        try:
            return self._accept(version, version.handoff)
        except (LoadFailed, OSError) as error:  # the latter of a small file, on NFS
            read = self._read_files(replace(version, handoff=None), go_on)
            return replace(read, handoff_failure=without_paths(describe(error)))

    def _accept(self, version: WeightVersion, handoff: common_pb2.Handoff) -> Verified:
        """Check that what is handed over is what the engine expects, by its description alone.
        Raises `LoadFailed`, `OSError`."""
        started = time.monotonic()
        if handoff.name != version.name:
            raise LoadFailed(f"{handoff.name} is handed over, not {version.name}")
        if not self._adds_up:
            raise LoadFailed("the engine does not keep numbers as they are, which proves a load")
        if handoff.dtype != self._facts.dtype:
            raise LoadFailed(f"it is in {handoff.dtype}, and the engine in {self._facts.dtype}")
        manifest = self._check(version, lambda: None)
        assert manifest is not None
        sums = sums_of(
            (each.name, each.sum) for each in handoff.tensors if each.name in self._expected
        )
        seconds = time.monotonic() - started
        return Verified(version, manifest.canary, sums, bytes=manifest.bytes, seconds=seconds)

    def _read_files(self, version: WeightVersion, go_on: Callable[[], None]) -> Verified:
        started = time.monotonic()
        try:
            manifest = self._check(version, go_on)
            sums = None if manifest is None else self._read(version.path, manifest, go_on)
            size = sum(file.path.stat().st_size for file in weights_files(version.path))
        except OSError as error:
            raise LoadFailed(f"{version.name} cannot be read: {describe(error)}") from error
        canary = None if manifest is None else manifest.canary
        seconds = time.monotonic() - started
        return Verified(version, canary, sums, bytes=size, seconds=seconds)

    def place(self, verified: Verified) -> None:
        """Put a version's weights into the engine, which must be idle. Raises `WeightsTouched`: the
        engine must not be used before another load."""
        version = verified.version
        if version.handoff is not None:
            missing = self._engine.load_handoff(version.handoff)
        else:
            missing = self._engine.load(version.path)
        if missing:
            name = version.name
            raise WeightsTouched(f"{name} left without a value: {sorted(missing)}")

    def confirm(self, verified: Verified) -> float:
        """Compare the engine's weights with the version's, empty the prefix cache, and compare the
        engine's logprobs with the canary's. Return their largest difference, NaN without a canary.
        Raises `WeightsTouched`."""
        name, canary = verified.version.name, verified.canary
        self._compare_sums(verified)
        if not self._engine.reset_prefix_cache():
            raise WeightsTouched(f"{name}: the engine did not empty its prefix cache")
        if canary is None or len(canary.tokens) < 2:
            return math.nan
        computed = self._engine.score(canary.tokens)
        try:
            return compare_with_canary(computed, canary, tolerance=self._tolerance, name=name)
        except LoadFailed as error:
            raise WeightsTouched(error.message) from error

    def _read(
        self, directory: Path, manifest: Manifest, go_on: Callable[[], None]
    ) -> WeightSums | None:
        """Read the tensors of a version whose own files are verified. The patches of a delta make
        its tensors. Return their sums, None if the engine cannot be compared with them."""
        adds_up = self._adds_up
        if not adds_up and not manifest.delta_of:
            return None

        def read(file: WeightsFile) -> WeightSums:
            if self._threads > 1:
                import torch

                torch.set_num_threads(1)  # of this thread, which has others beside it
            return self._sums_of(verified_tensors(file, manifest, go_on), go_on)

        sums = added_up(in_threads(read, weights_files(directory), threads=self._threads))
        return sums if adds_up else None

    def _sums_of(
        self, tensors: Iterable[tuple[str, torch.Tensor]], go_on: Callable[[], None]
    ) -> WeightSums:
        return file_sums(tensors, self._expected, dtype=self._facts.dtype, go_on=go_on)

    def _compare_sums(self, verified: Verified) -> None:
        """Raise `WeightsTouched` if the engine holds other numbers than a version's files.

        The base model's are those that it was started with. To compare it with files supposes that
        it keeps their numbers as they are: whether it does, the base model's files show as soon as
        others seem wrong. If it does not, the canary has to do.
        """
        version = verified.version
        wanted = self._base_sums if version.is_base else verified.sums
        wrong = [] if wanted is None else differing(self._engine.weight_sums(), wanted)
        if not wrong:
            return
        if not version.is_base and version.handoff is None:
            try:
                base = self._sums_of(read_tensors(self._base), lambda: None)
            except OSError as error:
                raise WeightsTouched(
                    f"{version.name}: the engine holds other numbers in {_some(wrong)}, and the "
                    "base model, which would tell whether it keeps numbers as they are, cannot be "
                    f"read: {describe(error)}"
                ) from error
            self._adds_up = not differing(self._base_sums, base)
        if self._adds_up or version.is_base or version.handoff is not None:
            raise WeightsTouched(
                f"{version.name}: the engine does not hold these weights, but other numbers in "
                f"{_some(wrong)}"
            )
        get_log().warning("weights_compared_by_canary_alone", engine=self._facts.name)

    def _check(self, version: WeightVersion, go_on: Callable[[], None]) -> Manifest | None:
        """Return the manifest of a version, None of a base model."""
        manifest = None
        if version.is_base:
            # It has no manifest, but its load is to find it read.
            each = model_files(version.path)
            in_threads(lambda file: checksum_file(file, go_on), each, threads=self._threads)
        else:
            files = version.handoff is None
            manifest = verified_manifest(
                version, self._facts, go_on, checksums=files, threads=self._threads
            )
            if manifest.adapter:
                raise LoadFailed(f"{version.name} is an adapter, but was named as a full version")
            untied = (version.path / "config.json").is_file() and not is_tied(version.path)
            if self._tied and untied:
                raise LoadFailed(
                    f"{version.name} has an output head of its own, which an engine whose head is "
                    "the embedding cannot load in place"
                )
        handoff = version.handoff
        found = read_inventory(version.path) if handoff is None else inventory_of(handoff)
        offered = loadable(found, tied=self._tied)
        check_inventory(offered, expected=self._expected, name=version.name)
        return manifest


def default_tolerance(dtype: str) -> float:
    """Return how far the logprobs of the trainer and of an engine of this dtype may differ."""
    return 1e-4 if dtype == "float32" else 0.5


def verified_manifest(
    version: WeightVersion,
    facts: EngineFacts,
    go_on: Callable[[], None] = lambda: None,
    *,
    checksums: bool = True,
    threads: int = 1,
) -> Manifest:
    """Return a version's manifest after checking its files against it, by their `checksums` or
    their sizes alone, in so many `threads`, and that the engine can compute its canary. `go_on` is
    called before each piece. Raises `LoadFailed`."""
    manifest = open_version(
        version.path, name=version.name, checksums=checksums, go_on=go_on, threads=threads
    )
    canary = manifest.canary
    if canary is None:
        return manifest
    if len(canary.tokens) != len(canary.logprobs) + 1:
        raise LoadFailed(f"{version.name}: the canary has no logprob for each token")
    tokens = canary.tokens
    if min(tokens) < 0 or max(tokens) >= facts.vocabulary or len(tokens) > facts.max_length:
        raise LoadFailed(f"{version.name}: the canary is no prompt for the model")
    return manifest


def compare_with_canary(
    computed: Float32Array, canary: Canary, *, tolerance: float, name: str
) -> float:
    """Return the largest difference of logprobs [T-1]. Raises `LoadFailed` above the tolerance."""
    difference = float(np.max(np.abs(computed - np.asarray(canary.logprobs, np.float32))))
    if not difference <= tolerance:  # NaN counts as a difference
        raise LoadFailed(
            f"{name}: the engine's logprobs differ from the trainer's by "
            f"{difference:.3g}, more than {tolerance:g}"
        )
    return difference


# --- Files of a model directory -----------------------------------------------------------


def is_tied(directory: Path) -> bool:
    """Return whether the output head is the embedding matrix."""
    config = read_again(lambda file: text_config(file.parent), directory / "config.json")
    return bool(config.get("tie_word_embeddings", False))


@dataclass(frozen=True)
class TensorEntry:
    """Dtype (in safetensors' notation, such as "F32") and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


Inventory = dict[str, TensorEntry]


def read_inventory(directory: Path) -> Inventory:
    """Return the dtypes and shapes of a directory's tensors by name, from the headers alone.

    Raises `LoadFailed` if a file is not safetensors or not whole, or a name occurs twice.
    """
    inventory: Inventory = {}
    for file in weights_files(directory):
        for name, entry in _read_header(file.path).items():
            if name in inventory:
                raise LoadFailed(f"{directory.name}: the tensor {name} is in more than one file")
            inventory[name] = entry
    if not inventory:
        raise LoadFailed(f"{directory.name} holds no safetensors file")
    return inventory


def inventory_of(handoff: common_pb2.Handoff) -> Inventory:
    """As `read_inventory`, of what a trainer hands over."""
    return {each.name: TensorEntry(each.dtype, tuple(each.shape)) for each in handoff.tensors}


def _read_header(file: Path) -> Inventory:
    try:
        with safe_open(file, framework="numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {
                name: TensorEntry(dtype=part.get_dtype(), shape=tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise LoadFailed(
            f"{file.parent.name}/{file.name} is not safetensors: {describe(error)}"
        ) from error


def loadable(inventory: Inventory, *, tied: bool) -> Inventory:
    """Drop the tensors that no engine loads: a tied output head, and rotary tables."""
    return {
        name: entry
        for name, entry in inventory.items()
        if not (tied and name.endswith("lm_head.weight"))
        and not name.endswith(
            ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
        )
    }


def check_inventory(offered: Inventory, *, expected: Inventory, name: str) -> None:
    """Raise `LoadFailed` unless a version has exactly the tensors that the engine expects.

    Names and shapes must be equal, and so must dtypes, except that any floating dtype may stand for
    another: the engine converts to its own.
    """
    missing = sorted(expected.keys() - offered.keys())
    foreign = sorted(offered.keys() - expected.keys())
    if missing or foreign:
        parts = [f"lacks {_some(missing)}"] * bool(missing) + [
            f"has {_some(foreign)} too many"
        ] * bool(foreign)
        raise LoadFailed(f"{name} {' and '.join(parts)}")
    for tensor, entry in offered.items():
        want = expected[tensor]
        if entry.shape != want.shape:
            raise LoadFailed(
                f"{name}: {tensor} has the shape {list(entry.shape)}, not {list(want.shape)}"
            )
        if entry.dtype != want.dtype and not {entry.dtype, want.dtype} <= _FLOATING:
            raise LoadFailed(f"{name}: {tensor} is {entry.dtype}, not {want.dtype}")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
