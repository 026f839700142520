"""LoRA adapters beside an engine's weights: verify, load, check, evict.

An adapter has PEFT's layout (`adapter_config.json`, `adapter_model.safetensors`) and our manifest.
Before the load, any thread checks (`read_ahead`) the manifest, the settings, and that every pair A
[r, in], B [out, r] fits a matrix of the base model. After it, the engine computes the trainer's
canary beside running requests."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from sampler_service.engine import Engine, EngineRequest, EngineResult
from sampler_service.weights.loader import (
    Inventory,
    LoadableVersion,
    LoadOutcome,
    Verified,
    compare_with_canary,
    read_inventory,
    verified_manifest,
)
from tandem.errors import LoadFailed, describe
from tandem.weights import Canary
from tandem.weights.model_config import read_json
from tandem.weights.store import read_again

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<letter>[AB])\.weight")
_EMBEDDINGS = ("model.embed_tokens", "embed_tokens", "transformer.wte", "gpt_neox.embed_in")
_FLOATING = {"F32", "F16", "BF16"}


def check_adapter(directory: Path, *, base: Inventory, max_rank: int, name: str) -> None:
    """Raise `LoadFailed` unless the engine can compute with the adapter as its trainer did.

    `base` has the base model's tensors. `name` is for messages."""
    config = read_again(read_json, directory / CONFIG_NAME)
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise LoadFailed(f"{name}: {CONFIG_NAME} is missing, or names no rank r")
    if rank > max_rank:
        raise LoadFailed(
            f"{name} has rank {rank}; this sampler was started for ranks up to {max_rank}"
        )
    for key in ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias"):
        if config.get(key):
            raise LoadFailed(f"{name}: {CONFIG_NAME} sets {key}, which is not served")
    if config.get("bias", "none") != "none":
        raise LoadFailed(f"{name}: {CONFIG_NAME} sets bias, which is not served")
    tensors = read_inventory(directory)
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor, entry in tensors.items():
        match = _TENSOR.fullmatch(tensor)
        if match is None or entry.dtype not in _FLOATING:
            raise LoadFailed(f"{name}: {tensor} ({entry.dtype}) is no matrix of an adapter")
        shapes.setdefault(match["layer"], {})[match["letter"]] = entry.shape
    for layer, pair in shapes.items():
        wanted = _matrix_of(layer, base)
        if wanted is None:
            raise LoadFailed(f"{name} changes {layer}, which the base model does not have")
        outputs, inputs = wanted
        if pair != {"A": (rank, inputs), "B": (outputs, rank)}:
            raise LoadFailed(
                f"{name}: A and B of {layer} are {pair}; for a matrix [{outputs}, {inputs}] and "
                f"rank {rank} they must be [{rank}, {inputs}] and [{outputs}, {rank}]"
            )


def _matrix_of(layer: str, base: Inventory) -> tuple[int, int] | None:
    """Return the shape of a layer's matrix. A tied output head has the shape of the embeddings."""
    names = [layer, *_EMBEDDINGS] if layer.endswith("lm_head") else [layer]
    for name in names:
        entry = base.get(f"{name}.weight")
        if entry is not None and len(entry.shape) == 2:
            return (entry.shape[0], entry.shape[1])
    return None


@dataclass(eq=False)
class _Adapter:
    """An adapter in the engine. It serves after its `canary`. `used` orders uses."""

    version: LoadableVersion
    bytes: int
    started: float
    used: int
    canary: Canary | None = None


class AdapterCache:
    """The adapters in an engine. A full one evicts the least recently used without a request.

    Use in the engine's thread: `make_room(...)`, then `load_adapter(verified)`. Step the engine and
    pass every result to `take_canary`. Once `ready(version)`, add requests that name it."""

    def __init__(
        self,
        engine: Engine,
        *,
        base: Path,
        tolerance: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`base` is the base model's directory. `tolerance` limits a canary's logprob
        difference."""
        self._engine = engine
        self._base = read_inventory(base) if engine.facts.max_lora_rank else {}
        self._tolerance = tolerance
        self._clock = clock
        self._adapters: dict[str, _Adapter] = {}
        self._uses = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, each in self._adapters.items() if each.canary is None)

    @property
    def full(self) -> bool:
        limit = self._engine.facts.max_adapters
        return bool(limit) and len(self._adapters) >= limit

    @property
    def verifying(self) -> bool:
        """Whether the engine computes a canary, and must be stepped."""
        return any(each.canary is not None for each in self._adapters.values())

    def __contains__(self, version: LoadableVersion) -> bool:
        """Return whether the engine has the adapter, checked or not."""
        return version.name in self._adapters

    def ready(self, version: LoadableVersion) -> bool:
        return version in self and self._adapters[version.name].canary is None

    def touch(self, version: LoadableVersion) -> None:
        self._uses += 1
        self._adapters[version.name].used = self._uses

    def make_room(self, *, needed: Collection[str]) -> bool:
        """Make room for one more adapter, by evicting one outside of `needed` if necessary.

        Returns False if that is impossible."""
        if not self.full:
            return True
        evictable = [
            each
            for name, each in self._adapters.items()
            if name not in needed and each.canary is None
        ]
        if not evictable:
            return False
        self._remove(min(evictable, key=lambda each: each.used).version.name)
        return True

    def verify(self, version: LoadableVersion, go_on: Callable[[], None]) -> Verified:
        """Read all files of an adapter, in any thread. Raises `LoadFailed`.

        `go_on` is called before each piece, and stops the reading by raising."""
        facts = self._engine.facts
        if not facts.max_lora_rank:
            raise LoadFailed(f"{version.name} is an adapter; this sampler was started without any")
        try:
            manifest = verified_manifest(version, facts, go_on)
            files = {entry.name for entry in manifest.files}
            if not manifest.adapter or not {CONFIG_NAME, TENSORS_NAME} <= files:
                raise LoadFailed(f"{version.name} is not published as an adapter")
            check_adapter(
                version.path, base=self._base, max_rank=facts.max_lora_rank, name=version.name
            )
        except (OSError, ValueError) as error:  # unreadable, or not JSON
            raise LoadFailed(f"{version.name} cannot be read: {describe(error)}") from error
        return Verified(version, manifest.canary, bytes=manifest.bytes)

    def load_adapter(self, verified: Verified) -> LoadOutcome | None:
        """Load an adapter. Returns the outcome, or None if `take_canary` will return it.

        Raises `LoadFailed` and then has changed nothing."""
        version, canary = verified.version, verified.canary
        assert version not in self
        started = self._clock()
        self._engine.add_adapter(version.name, version.path)
        self._uses += 1
        if canary is not None and len(canary.tokens) < 2:
            canary = None
        adapter = _Adapter(version, verified.bytes, started, used=self._uses, canary=canary)
        self._adapters[version.name] = adapter
        if canary is None:
            return self._outcome(adapter, difference=math.nan)
        name = version.name
        self._engine.add(EngineRequest.to_score(_canary_id(name), canary.tokens, adapter=name))
        return None

    def take_canary(
        self, result: EngineResult
    ) -> tuple[LoadableVersion, LoadOutcome | LoadFailed] | None:
        """Compare a canary's result with the canary. Returns None for any other result."""
        adapter = next((a for n, a in self._adapters.items() if _canary_id(n) == result.id), None)
        if adapter is None:
            return None
        assert adapter.canary is not None
        name = adapter.version.name
        try:
            if result.failure is not None:
                raise LoadFailed(f"{name}: no canary was computed: {result.failure.message}")
            assert result.prompt is not None and result.prompt.logprobs is not None
            difference = compare_with_canary(
                result.prompt.logprobs[1:], adapter.canary, tolerance=self._tolerance, name=name
            )
        except LoadFailed as error:
            self._remove(name)
            return adapter.version, error
        adapter.canary = None
        return adapter.version, self._outcome(adapter, difference=difference)

    def clear(self) -> None:
        """Forget all adapters. The engine dropped them with its old weights."""
        self._adapters.clear()

    def _remove(self, name: str) -> None:
        del self._adapters[name]
        self._engine.remove_adapter(name)

    def _outcome(self, adapter: _Adapter, *, difference: float) -> LoadOutcome:
        return LoadOutcome(
            version=adapter.version,
            bytes=adapter.bytes,
            seconds=self._clock() - adapter.started,
            canary_difference=difference,
        )


def _canary_id(name: str) -> str:
    return f"canary of {name}"
