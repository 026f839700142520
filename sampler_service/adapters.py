"""LoRA adapters beside an engine's weights: verified, added, proven, used, and taken out.

An adapter lies in PEFT's layout (`adapter_config.json`, `adapter_model.safetensors`) beside our
manifest. Before it is added: the manifest and its checksums, the settings, and that every pair
A [r, in], B [out, r] fits a matrix of the base model. Afterwards: that the engine computes the
trainer's canary with it, as a request among those that run already.

What is read of an adapter's files (checksums, then its tensors) is read in the engine's thread,
between two steps: what runs waits for that long, as it does while the engine copies the tensors
to their place. An adapter is a few parts in a hundred of its base model, and each is read once
as long as it stays. Nothing waits for the canary.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from sampler_service.engine import Engine, EngineRequest, EngineResult, PromptScoring
from sampler_service.model_files import Inventory, read_inventory, read_json
from sampler_service.reload import LoadOutcome, Version, compare_with_canary, verified_manifest
from tandem.errors import LoadFailed
from tandem.weights import Canary

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<letter>[AB])\.weight")
_EMBEDDINGS = ("model.embed_tokens", "embed_tokens", "transformer.wte", "gpt_neox.embed_in")
_FLOATING = {"F32", "F16", "BF16"}


def check_adapter(directory: Path, *, base: Inventory, max_rank: int, name: str) -> None:
    """Raises `LoadFailed` unless the engine can compute with the adapter as its trainer did.

    `base` are the tensors of the base model, by the names that it has in its files.
    """
    config = read_json(directory / CONFIG_NAME)
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
    """The shape of a layer's matrix. A tied output head has that of the embeddings."""
    names = [layer, *_EMBEDDINGS] if layer.endswith("lm_head") else [layer]
    for name in names:
        entry = base.get(f"{name}.weight")
        if entry is not None and len(entry.shape) == 2:
            return (entry.shape[0], entry.shape[1])
    return None


@dataclass(eq=False)
class _Held:
    """An adapter in the engine. `canary` is being computed while there is one."""

    version: Version
    bytes: int
    began: float
    used: int
    canary: Canary | None = None
    difference: float = field(default=math.nan)


class Adapters:
    """Those that lie in an engine, at most as many as it holds.

    Literal use, in the engine's thread: `begin(version)` once there is `room_for(...)`; step
    the engine, hand every result to `finish`; when `ready(version)`, add requests that name it.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        base: Path,
        tolerance: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._base = read_inventory(base) if engine.facts.max_lora_rank else {}
        self._tolerance = tolerance
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._uses = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Those that serve."""
        return tuple(name for name, held in self._held.items() if held.canary is None)

    @property
    def full(self) -> bool:
        most = self._engine.facts.max_adapters
        return bool(most) and len(self._held) >= most

    @property
    def proving(self) -> bool:
        """Whether the engine computes a canary, so that stepping it is worth while."""
        return any(held.canary is not None for held in self._held.values())

    def __contains__(self, version: Version) -> bool:
        """Whether it lies in the engine, proven or not yet."""
        return version.name in self._held

    def ready(self, version: Version) -> bool:
        held = self._held.get(version.name)
        return held is not None and held.canary is None

    def touch(self, version: Version) -> None:
        """Notes a use: the one that was used least recently leaves first."""
        self._uses += 1
        self._held[version.name].used = self._uses

    def make_room(self, *, needed: Collection[str]) -> bool:
        """Makes sure that one more fits, by taking out the longest unused one whose name is not
        `needed`. False when all are."""
        if not self.full:
            return True
        free = [h for n, h in self._held.items() if n not in needed and h.canary is None]
        if not free:
            return False
        self._remove(min(free, key=lambda held: held.used).version.name)
        return True

    def begin(self, version: Version) -> LoadOutcome | None:
        """Adds an adapter. Returns the outcome when it serves at once, having no canary, or None
        when it will be known by `finish`. Raises `LoadFailed`; nothing has changed then."""
        assert version not in self
        began = self._clock()
        facts = self._engine.facts
        if not facts.max_lora_rank:
            raise LoadFailed(f"{version.name} is an adapter; this sampler was started without any")
        try:
            manifest = verified_manifest(version, facts)
            files = {entry.name for entry in manifest.files}
            if not manifest.adapter or not {CONFIG_NAME, TENSORS_NAME} <= files:
                raise LoadFailed(f"{version.name} is not published as an adapter")
            check_adapter(
                version.path, base=self._base, max_rank=facts.max_lora_rank, name=version.name
            )
        except (OSError, ValueError) as error:  # unreadable, or no JSON
            raise LoadFailed(f"{version.name} cannot be read: {error}") from error
        self._engine.add_adapter(version.name, version.path)
        self._uses += 1
        canary = manifest.canary
        if canary is not None and len(canary.tokens) < 2:
            canary = None
        held = _Held(version, manifest.bytes, began, used=self._uses, canary=canary)
        self._held[version.name] = held
        if canary is None:
            return self._outcome(held)
        self._engine.add(
            EngineRequest(
                id=_canary_id(version.name),
                prompt=canary.tokens,
                num_samples=1,
                max_tokens=1,
                temperature=0.0,
                scoring=PromptScoring(first=1),
                adapter=version.name,
            )
        )
        return None

    def finish(self, result: EngineResult) -> tuple[Version, LoadOutcome | LoadFailed] | None:
        """Takes a result of the engine. None when it is not that of a canary."""
        held = next((h for n, h in self._held.items() if _canary_id(n) == result.id), None)
        if held is None:
            return None
        assert held.canary is not None and result.prompt is not None
        assert result.prompt.logprobs is not None
        try:
            held.difference = compare_with_canary(
                result.prompt.logprobs[1:],
                held.canary,
                tolerance=self._tolerance,
                name=held.version.name,
            )
        except LoadFailed as error:
            self._remove(held.version.name)
            return held.version, error
        held.canary = None
        return held.version, self._outcome(held)

    def clear(self) -> None:
        """The engine has loaded other weights, and has taken all of them out."""
        self._held.clear()

    def _remove(self, name: str) -> None:
        del self._held[name]
        self._engine.remove_adapter(name)

    def _outcome(self, held: _Held) -> LoadOutcome:
        return LoadOutcome(
            version=held.version,
            bytes=held.bytes,
            seconds=self._clock() - held.began,
            canary_difference=held.difference,
        )


def _canary_id(name: str) -> str:
    return f"canary of {name}"
