"""What each rank of a trainer has in memory between and during all operations: arithmetic over the
parameters of a model, and what its run trains.

Its trainer plans with it, before it loads anything (`trainer_service/backends/planning.py`), and
the gateway requests pods with it (`gateway/workers/launchers/kubernetes/resources.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.worker import TrainingSpec

SPARE = 0.1
"""Of what is free, left for what is not planned."""
MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
"""That are wanted, where settings leave it to the trainer. On a CPU the activations of more fall
out of the cache."""
LOGITS_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
_UNREDUCED_BYTES = {"cpu": 256 * 2**20, "cuda": 4 * 2**30}


@dataclass(frozen=True, kw_only=True)
class Elements:
    """How many numbers there are: `parameters` of the whole model, those that are `trained`, all
    `moments` of these, what a rank has `gathered` at once of what is sharded, and those of which it
    has copies (`weights_copied`)."""

    parameters: int
    trained: int
    moments: int
    gathered: int = 0
    copied: int = 0


def lasting_bytes(
    elements: Elements,
    *,
    training: TrainingSpec,
    shards: int,
    width: int,
    threads: int = 1,
    unreduced: int = 0,
    streamed: int = 0,
) -> dict[str, int]:
    """Return the bytes of one rank by what they are for. What is sharded is divided by `shards`;
    `width` are the bytes of a number in the type of the computation. `parts_on_host` says which of
    them a rank with a GPU has elsewhere."""
    states, frozen = training.state_bytes, 0
    if training.lora is not None:  # adapters are float32 and lie whole on every rank
        frozen, shards = width * _shard(elements.parameters, shards), 1
        states = TrainingSpec().state_bytes
    trained = _shard(elements.trained, shards)
    moments = _shard(elements.moments * states.moments // 2, shards)
    if training.layout.replicas > 1 and training.lora is None and not unreduced:
        unreduced = 4 * trained  # a replica's, until the last micro-batch of a call
    parts = {
        "frozen weights": frozen,
        "weights": states.weight * trained,
        # Each of several threads adds up gradients of its own.
        "gradients": states.gradient * trained * (1 + (threads if threads > 1 else 0)),
        "copies": width * elements.copied,
        "gathered": width * elements.gathered + streamed,
        "unreduced gradients": unreduced,
        "moments": moments,
        "snapshot": states.weight * trained + moments,
    }
    return {name: size for name, size in parts.items() if size}


def parts_on_host(training: TrainingSpec) -> set[str]:
    """Return what a rank with a GPU has in its host's memory, by the names of `lasting_bytes`."""
    parts = {"snapshot"}
    if training.moments_on_host:
        parts.add("moments")
    if training.weights_on_host:
        parts |= {"weights", "gradients"} if training.lora is None else {"frozen weights"}
    return parts


def weights_copied(training: TrainingSpec, *, ranks: int, width: int) -> bool:
    """Whether a rank computes with copies, of `width` bytes a number, of the float32 weights that
    it trains, which are made after each step. A rank alone does, if there is memory for them."""
    kept = training.state_bytes.weight
    alone = ranks == 1 and training.lora is None and not training.weights_on_host
    return alone and kept == 4 and width < kept


def weights_sharded(training: TrainingSpec, *, ranks: int, width: int, copied: bool) -> bool:
    """Whether FSDP holds the weights, and gathers them in the type of the computation: those of
    several ranks; and of one that keeps them in another type, and has no copies of them, or keeps
    them on its host."""
    return (
        ranks > 1
        or training.weights_on_host
        or (_kept_width(training, width) != width and not copied)
    )


def gathered(groups: Sequence[int], *, root: int) -> int:
    """Return how many numbers a rank has gathered at once, at most: those of the `root`, with the
    embeddings and the head, and of two of FSDP's other `groups`, one of which comes while the other
    is computed."""
    return root + sum(sorted(groups)[-2:])


def streamed_bytes(
    groups: Sequence[int], *, root: int, shards: int, width: int, training: TrainingSpec
) -> int:
    """Return the bytes that a rank has on its GPU besides what it has `gathered`, at most, while
    its part of a group comes from the host: as it is kept there, and in the type of the
    computation. The root comes before the others."""
    kept = _kept_width(training, width)
    each = kept + (width if width != kept else 0)
    others = sum(sorted(groups)[-2:])
    of_root = each * _shard(root, shards) - width * others
    return max(of_root, each * _shard(max(groups, default=0), shards))


def unreduced_gradients(
    parameters: int, *, limit: int, device: str, ranks: int, training: TrainingSpec
) -> int:
    """Return the bytes of the gradients of the whole model, in float32, if each rank is to add them
    up during a call and they are reduced at its end; else 0. `limit` 0: that of the `device`, "cpu"
    or "cuda".

    Not what is free decides: a trainer that is restored must add in the same order.
    """
    several = ranks > 1 and training.lora is None  # adapters are reduced once for a step
    size = 4 * parameters
    return size if several and size <= (limit or _UNREDUCED_BYTES[device]) else 0


def _kept_width(training: TrainingSpec, width: int) -> int:
    """Return the bytes of a number of the weights that are sharded."""
    return width if training.lora is not None else training.state_bytes.weight


def _shard(elements: int, shards: int) -> int:
    return math.ceil(elements / shards)
