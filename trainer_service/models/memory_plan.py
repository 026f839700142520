"""The memory plan: the bytes that a run needs of each rank's device and of its host, before
anything is loaded, and the micro-batch and the checkpointing that fit.

What stays (weights, gradients, moments, copies of them) is arithmetic. What comes and goes with a
micro-batch, its `activations`, is counted on a model without memory (`rehearsal.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tandem.errors import WorkerStartFailed
from tandem.trainer_memory import MICRO_BATCH_TOKENS

PLAIN_TOKENS = 4096
"""A micro-batch that is halved down to so many tokens loses less than one of checkpointed blocks,
which compute a third more."""
LEAST_TOKENS = 256
"""A micro-batch of fewer is of no use to anybody, unless it is all that is wanted."""
_GIB = 2**30


@dataclass(frozen=True)
class Needs:
    """Bytes of one rank by what they are for, such as "weights". On a CPU all are in `device`,
    which is the host."""

    device: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Available:
    """Bytes that one rank may use. On a CPU all are in `device`."""

    device: int
    host: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """The chosen micro-batch, and the memory that it needs and may use. All ranks have the same."""

    micro_batch_tokens: int
    checkpointing: bool
    needs: Needs
    available: Available

    def checkpoints(self, tokens: int) -> bool:
        """Whether blocks are checkpointed in a micro-batch of so many tokens. One sequence may be
        longer than a planned micro-batch, and what it needs grows with it."""
        if self.checkpointing or tokens <= self.micro_batch_tokens:
            return self.checkpointing
        activations = self.needs.device["activations"]
        more = activations * tokens // self.micro_batch_tokens - activations
        return sum(self.needs.device.values()) + more > self.available.device


def wanted_tokens(setting: int, *, device: str) -> int:
    """The tokens of a micro-batch where memory allows them."""
    return setting or MICRO_BATCH_TOKENS["cpu" if device == "cpu" else "cuda"]


def choose(
    *,
    wanted: int,
    checkpointing: Literal["auto", "on", "off"],
    lasting: Needs,
    activations: Callable[[int, bool], int],
    available: Available,
    what_helps: Sequence[str] = (),
) -> MemoryPlan:
    """Return the plan with the largest micro-batch up to the `wanted` one, halved until it fits.
    Blocks are checkpointed only if `PLAIN_TOKENS` do not fit otherwise. `activations` are the bytes
    for so many tokens, with checkpointed blocks or not. Raises `WorkerStartFailed`, with the
    numbers."""
    least = min(LEAST_TOKENS, wanted)
    halves = [wanted >> times for times in range(wanted.bit_length()) if wanted >> times >= least]
    tries = [(tokens, checkpointing != "off") for tokens in halves]
    if checkpointing == "auto":
        plain = min(PLAIN_TOKENS, wanted)
        tries = [(tokens, False) for tokens in halves if tokens >= plain] + tries
    for tokens, checkpointed in tries:
        device = {**lasting.device, "activations": activations(tokens, checkpointed)}
        plan = MemoryPlan(tokens, checkpointed, Needs(device, lasting.host), available)
        if not (missing := _missing(plan)):
            return plan
    raise WorkerStartFailed(_refusal(plan, missing, what_helps))


def _missing(plan: MemoryPlan) -> str:
    """Where the memory is too small for a plan; "" if nowhere."""
    if sum(plan.needs.host.values()) > plan.available.host:
        return "host"
    return "device" if sum(plan.needs.device.values()) > plan.available.device else ""


def _refusal(plan: MemoryPlan, missing: str, what_helps: Sequence[str]) -> str:
    parts: Mapping[str, int] = getattr(plan.needs, missing)
    of = "host" if missing == "host" or not plan.available.host else "GPU"
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in largest_first)
    blocks = "checkpointed blocks" if plan.checkpointing else "blocks that keep all"
    sentence = (
        f"the model does not fit into memory: with {plan.micro_batch_tokens} tokens at a time and "
        f"{blocks}, each rank needs {_gib(sum(parts.values()))} GiB of its {of} ({listed}), "
        f"and may use {_gib(getattr(plan.available, missing))} GiB"
    )
    return f"{sentence}. What helps: {', '.join(what_helps)}" if what_helps else sentence


def _gib(size: int) -> str:
    return f"{size / _GIB:.3g}"
