"""Replaces an engine's weights: verify, load in place, check, compare, then serve.

While the engine samples (`read_ahead`), a thread checks the manifest, its checksums, and the names,
shapes and dtypes of all tensors. After the load come four checks:

1. Every parameter has a value.
2. The engine holds exactly the trainer's numbers, by the manifest's `sums`. A folder without sums
   of the engine's dtype is summed here.
3. The prefix cache is empty.
4. The engine's logprobs equal the trainer's at publication (the canary).

The sums find a single changed bit, but no wrong place. The canary finds that, within its tolerance.
A base model has neither manifest nor canary."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import ValidationError

from sampler_service.engine import Engine, EngineFacts, Float32Array, WeightsTouched
from sampler_service.weights.files import read_tensors, tensors_in, weights_files
from tandem.errors import InvalidRequest, LoadFailed, describe, without_paths
from tandem.telemetry import get_log
from tandem.v1 import common_pb2
from tandem.weights import Canary, Manifest, checksum_file, open_version
from tandem.weights.model_config import model_files, text_config
from tandem.weights.model_files import listed
from tandem.weights.store import in_threads, read_again
from tandem.weights.sums import WeightSums, added_up, differing, file_sums, sums_of
from tandem.weights.tensors import read_header

if TYPE_CHECKING:
    import torch

_BASE_PREFIX = "base/"
_MOST_READERS = 8
_FLOATING = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class LoadableVersion:
    """A weight version in a request, identified by its name and kind.

    An `adapter` is computed beside the base model's weights. With a `handoff`, no file is read. A
    `plain` directory has no manifest."""

    name: str
    path: Path = field(compare=False)
    run_id: str = field(default="", compare=False)
    step: int = field(default=0, compare=False)
    adapter: bool = False
    handoff: common_pb2.Handoff | None = field(default=None, compare=False)
    plain: bool = field(default=False, compare=False)

    @property
    def is_base(self) -> bool:
        return self.name.startswith(_BASE_PREFIX)


@dataclass(frozen=True)
class LoadOutcome:
    """A successful load. `seconds` is the time without sampling.

    `canary_difference` is NaN without a canary. `handed_off`: the weights came from memory.
    `handoff_failure` is the reason if files were read instead."""

    version: LoadableVersion
    bytes: int
    seconds: float
    canary_difference: float
    handed_off: bool = False
    handoff_failure: str = ""


@dataclass(frozen=True)
class Verified:
    """A version with whole files that fit the engine.

    `sums` are None if the engine's cannot be compared. A version with a `handoff` is loaded from
    it, without its files. After `handoff_failure` it has none."""

    version: LoadableVersion
    canary: Canary | None = None
    sums: WeightSums | None = None
    bytes: int = 0
    handoff_failure: str = ""


class Loader:
    """Loads versions into one engine. `base` defines the tensors of a version.

    `verify` needs no engine. `place` needs the weights' memory, and `confirm` also the KV cache."""

    def __init__(self, engine: Engine, *, base: Path, tolerance: float) -> None:
        """The engine must hold the weights of `base`. `tolerance` limits a canary's logprob
        difference."""
        self._engine = engine
        self._base = base
        self._facts = engine.facts
        self._tied = is_tied(base)
        self._expected = loadable(read_inventory(base), tied=self._tied)
        self._tolerance = tolerance
        self._base_sums = engine.weight_sums()
        self._adds_up = True
        self._threads = min(_MOST_READERS, len(os.sched_getaffinity(0)))

    def verify(self, version: LoadableVersion, go_on: Callable[[], None]) -> Verified:
        """Read all files of a version, in any thread. Raises `LoadFailed`.

        `go_on` is called before each piece, and stops the reading by raising."""
        if version.handoff is None:
            return self._read_files(version, go_on)
        try:
            return self._accept(version, version.handoff)
        except (LoadFailed, ValidationError) as error:
            read = self._read_files(replace(version, handoff=None), go_on)
            return replace(read, handoff_failure=without_paths(describe(error)))

    def _accept(self, version: LoadableVersion, handoff: common_pb2.Handoff) -> Verified:
        """Check the description of a handoff against the engine. The version's files may not be
        written yet. Raises `LoadFailed`, and `ValidationError` for its manifest."""
        if handoff.name != version.name:
            raise LoadFailed(f"{handoff.name} is handed over, not {version.name}")
        if not self._adds_up:
            raise LoadFailed("the engine does not keep numbers as they are, which proves a load")
        if handoff.dtype != self._facts.dtype:
            raise LoadFailed(f"it is in {handoff.dtype}, and the engine in {self._facts.dtype}")
        manifest = Manifest.model_validate_json(handoff.manifest)
        if manifest.version != version.name:
            raise LoadFailed(f"its manifest is of {manifest.version}")
        check_canary(manifest.canary, self._facts, name=version.name)
        offered = loadable(inventory_of(handoff), tied=self._tied)
        check_inventory(offered, expected=self._expected, name=version.name)
        if (sums := self._published_sums(manifest)) is None:
            raise LoadFailed("its manifest has no sums, which prove a load")
        return Verified(version, manifest.canary, sums, bytes=handoff.bytes)

    def _read_files(self, version: LoadableVersion, go_on: Callable[[], None]) -> Verified:
        try:
            manifest = self._check(version, go_on)
            sums = None if version.is_base else self._read(version.path, manifest, go_on)
            size = sum(file.stat().st_size for file in weights_files(version.path))
        except OSError as error:
            raise LoadFailed(f"{version.name} cannot be read: {describe(error)}") from error
        canary = None if manifest is None else manifest.canary
        return Verified(version, canary, sums, bytes=size)

    def place(self, verified: Verified) -> None:
        """Put a version's weights into the idle engine.

        Raises `WeightsTouched`, after which the engine needs another load."""
        version = verified.version
        if version.handoff is not None:
            missing = self._engine.load_handoff(version.handoff)
        else:
            missing = self._engine.load(version.path)
        if missing:
            name = version.name
            raise WeightsTouched(f"{name} left without a value: {sorted(missing)}")

    def confirm(self, verified: Verified) -> float:
        """Check the sums, empty the prefix cache, and compare the canary. Raises `WeightsTouched`.

        Returns the largest logprob difference, or NaN without a canary."""
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
        self, directory: Path, manifest: Manifest | None, go_on: Callable[[], None]
    ) -> WeightSums | None:
        """Return the sums of a version with verified files, or None if the engine's cannot be
        compared."""
        if not self._adds_up:
            return None
        if published := self._published_sums(manifest):
            return published

        def read(file: Path) -> WeightSums:
            if self._threads > 1:
                import torch

                torch.set_num_threads(1)  # per thread: this one runs beside others
            return self._sums_of(tensors_in(file), go_on)

        return added_up(in_threads(read, weights_files(directory), threads=self._threads))

    def _published_sums(self, manifest: Manifest | None) -> WeightSums | None:
        if manifest is None or manifest.dtype != self._facts.dtype or not manifest.sums:
            return None
        return sums_of((name, s) for name, s in manifest.sums.items() if name in self._expected)

    def _sums_of(
        self, tensors: Iterable[tuple[str, torch.Tensor]], go_on: Callable[[], None]
    ) -> WeightSums:
        return file_sums(tensors, self._expected, dtype=self._facts.dtype, go_on=go_on)

    def _compare_sums(self, verified: Verified) -> None:
        """Raise `WeightsTouched` if the engine's numbers differ from the version's files.

        The comparison supposes that the engine stores numbers unchanged. If sums differ, the base
        model's files show whether it does. If not, the canary must suffice."""
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
                    f"{version.name}: the engine holds other numbers in {listed(wrong)}, and the "
                    "base model, which would tell whether it keeps numbers as they are, cannot be "
                    f"read: {describe(error)}"
                ) from error
            self._adds_up = not differing(self._base_sums, base)
        if self._adds_up or version.is_base or version.handoff is not None:
            raise WeightsTouched(
                f"{version.name}: the engine does not hold these weights, but other numbers in "
                f"{listed(wrong)}"
            )
        get_log().warning("weights_compared_by_canary_alone", engine=self._facts.name)

    def _check(self, version: LoadableVersion, go_on: Callable[[], None]) -> Manifest | None:
        """Check a version's files and tensors. Returns its manifest, or None without one."""
        manifest = None
        if version.is_base:
            # No manifest, but reading the files puts them into the page cache.
            each = model_files(version.path)
            in_threads(lambda file: checksum_file(file, go_on), each, threads=self._threads)
        elif not version.plain:
            manifest = verified_manifest(version, self._facts, go_on, threads=self._threads)
            if manifest.adapter:
                raise LoadFailed(f"{version.name} is an adapter, but was named as a full version")
        if not version.is_base:
            untied = (version.path / "config.json").is_file() and not is_tied(version.path)
            if self._tied and untied:
                raise LoadFailed(
                    f"{version.name} has an output head of its own, which an engine whose head is "
                    "the embedding cannot load in place"
                )
        offered = loadable(read_inventory(version.path), tied=self._tied)
        check_inventory(offered, expected=self._expected, name=version.name)
        return manifest


_ROUNDING = 1e-4
"""The share of an unlikely token's logprob that rounding in float32 may change."""


def default_tolerance(dtype: str) -> float:
    """Return the largest allowed logprob difference between trainer and engine for this dtype."""
    return 1e-4 if dtype == "float32" else 0.5


def verified_manifest(
    version: LoadableVersion,
    facts: EngineFacts,
    go_on: Callable[[], None] = lambda: None,
    *,
    threads: int = 1,
) -> Manifest:
    """Check a version's files and canary against the engine. Returns the manifest.

    `go_on` is called before each piece. Raises `LoadFailed`."""
    manifest = open_version(version.path, name=version.name, go_on=go_on, threads=threads)
    check_canary(manifest.canary, facts, name=version.name)
    return manifest


def check_canary(canary: Canary | None, facts: EngineFacts, *, name: str) -> None:
    """Raise `LoadFailed` unless the engine can compute the canary."""
    if canary is None:
        return
    if len(canary.tokens) != len(canary.logprobs) + 1:
        raise LoadFailed(f"{name}: the canary has no logprob for each token")
    tokens = canary.tokens
    if min(tokens) < 0 or max(tokens) >= facts.vocabulary or len(tokens) > facts.max_length:
        raise LoadFailed(f"{name}: the canary is no prompt for the model")


def compare_with_canary(
    computed: Float32Array, canary: Canary, *, tolerance: float, name: str
) -> float:
    """Return the largest difference of logprobs [T-1]. Raises `LoadFailed` above the tolerance.

    A token may differ by 0.01 % of its logprob in addition, because rounding grows with the
    logits."""
    expected = np.asarray(canary.logprobs, np.float32)
    differences = np.abs(computed - expected)
    sizes = np.nan_to_num(np.abs(expected), posinf=0)  # infinity allows no difference
    allowed = tolerance + _ROUNDING * sizes
    if not np.all(differences <= allowed):  # NaN counts as a difference
        worst = np.argmax(differences / allowed)
        raise LoadFailed(
            f"{name}: the engine's logprobs differ from the trainer's by "
            f"{differences[worst]:.3g}, more than {allowed[worst]:.3g}; save the weights again"
        )
    return float(np.max(differences))


# --- Files of a model directory -----------------------------------------------------------


def is_tied(directory: Path) -> bool:
    config = read_again(lambda file: text_config(file.parent), directory / "config.json")
    return bool(config.get("tie_word_embeddings", False))


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's dtype, in safetensors' notation such as "F32", and shape."""

    dtype: str
    shape: tuple[int, ...]


Inventory = dict[str, TensorEntry]


def read_inventory(directory: Path) -> Inventory:
    """Return the dtypes and shapes of a directory's tensors by name, read from the headers.

    Raises `LoadFailed` if a file is damaged or not safetensors, or if a name occurs twice."""
    inventory: Inventory = {}
    for file in weights_files(directory):
        try:
            header = read_header(file)
        except InvalidRequest as error:
            raise LoadFailed(f"{directory.name}: {error.message}") from error
        for name, each in header.items():
            if name in inventory:
                raise LoadFailed(f"{directory.name}: the tensor {name} is in more than one file")
            inventory[name] = TensorEntry(each.dtype, each.shape)
    if not inventory:
        raise LoadFailed(f"{directory.name} holds no safetensors file")
    return inventory


def inventory_of(handoff: common_pb2.Handoff) -> Inventory:
    return {each.name: TensorEntry(each.dtype, tuple(each.shape)) for each in handoff.tensors}


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
    """Raise `LoadFailed` unless a version has exactly the engine's tensors.

    Names and shapes must be equal. The engine converts floating dtypes."""
    missing = sorted(expected.keys() - offered.keys())
    foreign = sorted(offered.keys() - expected.keys())
    if missing or foreign:
        parts = [f"lacks {listed(missing)}"] * bool(missing) + [
            f"has {listed(foreign)} too many"
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
