"""Changing an engine's weights: verify, load in place, check, compare, and only then serve.

What is checked before the old weights are touched: the manifest and its checksums, and the
names, shapes and dtypes of all tensors. What is checked afterwards: that every parameter of the
engine got a value, that the prefix cache is empty, and that the engine computes the logprobs
which the trainer recorded when it published (the canary). A base model has no manifest and
no canary; for it the rest holds.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sampler_service.engine import Engine, EngineFacts, Float32Array, WeightsTouched
from sampler_service.model_files import (
    Inventory,
    check_inventory,
    is_tied,
    loadable,
    read_inventory,
)
from tandem.errors import LoadFailed
from tandem.weights import Canary, Manifest, open_version

_BASE_PREFIX = "base/"
_TOLERANCES = {"float32": 1e-4}
_TOLERANCE_OF_OTHERS = 0.5


@dataclass(frozen=True)
class Version:
    """A weight version as requests name it. Equal when the names are equal. An `adapter` rests
    upon the base model."""

    name: str
    path: Path
    run_id: str = ""
    step: int = 0
    adapter: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def is_base(self) -> bool:
        return self.name.startswith(_BASE_PREFIX)


@dataclass(frozen=True)
class LoadOutcome:
    """A load that succeeded. `canary_difference` is NaN without a canary."""

    version: Version
    bytes: int
    seconds: float
    canary_difference: float


def default_tolerance(dtype: str) -> float:
    """How far logprobs of the trainer and the engine may lie apart."""
    return _TOLERANCES.get(dtype, _TOLERANCE_OF_OTHERS)


def verified_manifest(version: Version, facts: EngineFacts) -> Manifest:
    """The manifest of a version whose files are whole, and whose canary the engine can compute.
    Raises `LoadFailed`."""
    manifest = open_version(version.path, name=version.name)
    canary = manifest.canary
    if canary is None:
        return manifest
    if len(canary.tokens) != len(canary.logprobs) + 1:
        raise LoadFailed(f"{version.name}: the canary has no logprob for each token")
    tokens = canary.tokens
    if min(tokens) < 0 or max(tokens) >= facts.vocabulary or len(tokens) >= facts.max_length:
        raise LoadFailed(f"{version.name}: the canary is no prompt for the model")
    return manifest


def compare_with_canary(
    computed: Float32Array, canary: Canary, *, tolerance: float, name: str
) -> float:
    """The largest difference of logprobs [T-1]. Raises `LoadFailed` above the tolerance."""
    difference = float(np.max(np.abs(computed - np.asarray(canary.logprobs, np.float32))))
    if not difference <= tolerance:  # NaN counts as a difference
        raise LoadFailed(
            f"{name}: the engine's logprobs differ from the trainer's by "
            f"{difference:.3g}, more than {tolerance:g}"
        )
    return difference


class Loader:
    """Loads versions into one engine, whose first weights say which tensors there must be."""

    def __init__(self, engine: Engine, *, base: Path, tied: bool, tolerance: float = 0.0) -> None:
        self._engine = engine
        self._tied = tied
        self._expected: Inventory = loadable(read_inventory(base), tied=tied)
        self._tolerance = tolerance or default_tolerance(engine.facts.dtype)

    def load(self, version: Version) -> LoadOutcome:
        """Puts a version into the engine, which must be idle.

        Raises `LoadFailed` when nothing was touched, `WeightsTouched` when the engine must not
        be used before another load.
        """
        started = time.monotonic()
        try:
            canary = self._verify(version)
        except OSError as error:
            raise LoadFailed(f"{version.name} cannot be read: {error}") from error
        loaded = self._engine.load(version.path)
        if loaded.missing:
            raise WeightsTouched(f"{version.name} left without a value: {sorted(loaded.missing)}")
        if not self._engine.reset_prefix_cache():
            raise WeightsTouched(f"{version.name}: the engine did not empty its prefix cache")
        difference = self._compare(version, canary)
        return LoadOutcome(
            version=version,
            bytes=sum(file.stat().st_size for file in version.path.glob("*.safetensors")),
            seconds=time.monotonic() - started,
            canary_difference=difference,
        )

    def _verify(self, version: Version) -> Canary | None:
        canary = None
        if not version.is_base:
            manifest = verified_manifest(version, self._engine.facts)
            if manifest.adapter:
                raise LoadFailed(f"{version.name} is an adapter, but was named as a full version")
            canary = manifest.canary
            untied = (version.path / "config.json").is_file() and not is_tied(version.path)
            if self._tied and untied:
                raise LoadFailed(
                    f"{version.name} has an output head of its own (an unembedding adapter was "
                    "merged in), which an engine whose head is the embedding cannot load in "
                    "place; sample from the adapter itself"
                )
        offered = loadable(read_inventory(version.path), tied=self._tied)
        check_inventory(offered, expected=self._expected, name=version.name)
        return canary

    def _compare(self, version: Version, canary: Canary | None) -> float:
        """The largest difference of logprobs. Raises `WeightsTouched` above the tolerance."""
        if canary is None or len(canary.tokens) < 2:
            return math.nan
        computed = self._engine.score(canary.tokens)
        try:
            return compare_with_canary(
                computed, canary, tolerance=self._tolerance, name=version.name
            )
        except LoadFailed as error:
            raise WeightsTouched(error.message) from error
