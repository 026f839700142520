"""Replaces an engine's weights: verify, load in place, check, compare, and only then serve.

Before the old weights are touched: the manifest and its checksums, and the names, shapes and dtypes
of all tensors. Afterwards: every parameter of the engine has got a value, the prefix cache is
empty, and the engine computes the logprobs that the trainer recorded when it published (the
canary). A base model has neither manifest nor canary; the rest applies to it, too.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sampler_service.engine import Engine, EngineFacts, Float32Array, WeightsTouched
from sampler_service.weights.model_files import (
    check_inventory,
    is_tied,
    loadable,
    read_inventory,
)
from tandem.errors import LoadFailed
from tandem.weights import Canary, Manifest, open_version

_BASE_PREFIX = "base/"
_TOLERANCES = {"float32": 1e-4}
_DEFAULT_TOLERANCE = 0.5


@dataclass(frozen=True)
class WeightVersion:
    """A weight version as a request names it. Versions of one name are equal. An `adapter` is
    computed beside the base model's weights."""

    name: str
    path: Path
    run_id: str = ""
    step: int = 0
    adapter: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeightVersion) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def is_base(self) -> bool:
        return self.name.startswith(_BASE_PREFIX)


@dataclass(frozen=True)
class LoadOutcome:
    """A load that succeeded. `canary_difference` is NaN without a canary."""

    version: WeightVersion
    bytes: int
    seconds: float
    canary_difference: float


class Loader:
    """Loads versions into one engine. `base`, which the engine was started with, says which tensors
    a version must have."""

    def __init__(self, engine: Engine, *, base: Path, tolerance: float) -> None:
        """`tolerance` is the largest logprob difference that a canary may show."""
        self._engine = engine
        self._tied = is_tied(base)
        self._expected = loadable(read_inventory(base), tied=self._tied)
        self._tolerance = tolerance

    def load(self, version: WeightVersion) -> LoadOutcome:
        """Load a version into the engine, which must be idle.

        Raises `LoadFailed` if nothing was touched, `WeightsTouched` if the engine must not be used
        before another load.
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
        return LoadOutcome(
            version=version,
            canary_difference=self._compare(version, canary),
            bytes=sum(file.stat().st_size for file in version.path.glob("*.safetensors")),
            seconds=time.monotonic() - started,
        )

    def _verify(self, version: WeightVersion) -> Canary | None:
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

    def _compare(self, version: WeightVersion, canary: Canary | None) -> float:
        if canary is None or len(canary.tokens) < 2:
            return math.nan
        computed = self._engine.score(canary.tokens)
        try:
            return compare_with_canary(
                computed, canary, tolerance=self._tolerance, name=version.name
            )
        except LoadFailed as error:
            raise WeightsTouched(error.message) from error


def default_tolerance(dtype: str) -> float:
    """Return how far the logprobs of the trainer and of an engine of this dtype may differ."""
    return _TOLERANCES.get(dtype, _DEFAULT_TOLERANCE)


def verified_manifest(version: WeightVersion, facts: EngineFacts) -> Manifest:
    """Return a version's manifest after checking its files against it, and that the engine can
    compute its canary. Raises `LoadFailed`."""
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
    """Return the largest difference of logprobs [T-1]. Raises `LoadFailed` above the tolerance."""
    difference = float(np.max(np.abs(computed - np.asarray(canary.logprobs, np.float32))))
    if not difference <= tolerance:  # NaN counts as a difference
        raise LoadFailed(
            f"{name}: the engine's logprobs differ from the trainer's by "
            f"{difference:.3g}, more than {tolerance:g}"
        )
    return difference
