"""A trainer's memory: a formula over a model's shapes, a run's training and the settings.

A trainer chooses its micro-batch with it before it loads anything
(`trainer_service/backends/planning.py`). The gateway places trainers with it
(`gateway/workers/needs.py`). Weights, gradients and moments are exact. Activations and logits are
estimates: a micro-batch that runs out of memory is halved and computed again."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tandem.errors import WorkerStartFailed
from tandem.protocol.worker import TrainingSpec
from tandem.settings.workers import TrainerSettings
from tandem.weights.model_config import (
    HEAD_KEYS,
    LENGTH_KEYS,
    Json,
    experts_of,
    has_eager_attention,
)

SPARE = 0.1
"""The part of the free memory for needs outside of the formula."""
PLAIN_TOKENS = 4096
"""A micro-batch is halved down to this before blocks are checkpointed, which costs a third more."""
LEAST_TOKENS = 256
"""The smallest planned micro-batch, unless the settings ask for less."""
LOGITS_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
SAFETY = 1.4
"""The factor on kept activations: norms and softmaxes keep more than the formula counts."""
_MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
"""On a CPU the activations of a larger one exceed the cache."""
_UNREDUCED_BYTES = {"cpu": 256 * 2**20, "cuda": 4 * 2**30}
_SCORES = 2
"""Eager attention keeps its scores for the softmax and for the product with the values."""
_FLOAT32 = 4
_LOGIT_BYTES = 3 * _FLOAT32
"""A logit of a chunk, its log-softmax, and one of their gradients."""
_GIB = 2**30
_BLOCK = re.compile(r"(?:.*?\.)?\d+\.")
"""The common prefix of a block's tensors, such as `model.layers.3.`."""
_EXPERTS = ".experts."


# --- The model ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model's size, in numbers.

    They are all `parameters`, those of each of the `blocks` and `tensors`, and those of a rank-1
    adapter on all matrices (`adapter_width`). `width` adds the inputs and outputs of the matrices
    that all tokens pass, `expert_width` those of a token's experts. `eager_heads` counts the heads
    of eager attention, which keeps its scores. `length` is the longest sequence. The last four are
    0 if the configuration lacks them."""

    parameters: int
    adapter_width: int
    blocks: tuple[int, ...] = ()
    width: int = 0
    expert_width: int = 0
    tensors: tuple[int, ...] = ()
    eager_heads: int = 0
    length: int = 0
    vocabulary: int = 0
    hidden: int = 0

    def divided(self, ranks: int) -> ModelSize:
        """Return one rank's part if ranks divide the matrices. Small undivided parts are ignored.

        A rank computes rows for all of a token's experts, also for those of other ranks."""
        if ranks == 1:
            return self
        return replace(
            self,
            parameters=self.parameters // ranks,
            blocks=tuple(block // ranks for block in self.blocks),
            width=self.width // ranks,
            tensors=tuple(tensor // ranks for tensor in self.tensors),
        )

    def pinned(self, shards: int) -> int:
        """Return the parameters of a shard in torch's pinned memory, which has powers of two."""
        parts = (_part(tensor, shards) for tensor in self.tensors)
        return sum(1 << max(0, part - 1).bit_length() for part in parts)

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, Sequence[int]], config: Json) -> ModelSize:
        """Return a model's size from its tensors' shapes and its `config.json`."""
        blocks: Counter[str] = Counter()
        adapter_width, width, expert_width = 0, 0, 0.0
        experts, chosen = experts_of(config)
        for name, shape in shapes.items():
            ends = math.prod(shape[:-2]) * sum(shape[-2:]) if len(shape) >= 2 else 0
            adapter_width += ends
            if block := _BLOCK.match(name):
                blocks[block[0]] += math.prod(shape)
                if _EXPERTS not in name or not experts:
                    width += ends
                elif len(shape) == 3:  # a rank may have some of the experts
                    expert_width += chosen * sum(shape[-2:])
                else:
                    expert_width += ends * chosen / experts
        tensors = tuple(math.prod(shape) for shape in shapes.values())
        return cls(
            parameters=sum(tensors),
            adapter_width=adapter_width,
            blocks=tuple(blocks.values()),
            width=width,
            expert_width=round(expert_width),
            tensors=tensors,
            eager_heads=_number(config, *HEAD_KEYS) if has_eager_attention(config) else 0,
            length=_number(config, *LENGTH_KEYS),
            vocabulary=_number(config, "vocab_size"),
            hidden=_number(config, "hidden_size", "n_embd", "d_model"),
        )


def _number(config: Json, *names: str) -> int:
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)


# --- The formula ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainerMemory:
    """The memory of one rank of a trainer.

    `model` is the rank's part. `trained` and `moments` count the run's numbers. A CPU rank may
    compute several micro-batches `at_once`. `device` is "cpu" or "cuda"."""

    model: ModelSize
    trained: int
    moments: int
    training: TrainingSpec
    settings: TrainerSettings
    device: str
    ranks: int
    at_once: int = 1

    @property
    def wanted_tokens(self) -> int:
        return wanted_tokens(self.settings.micro_batch_tokens, device=self.device)

    @property
    def width(self) -> int:
        """The bytes of a number in the compute dtype."""
        return compute_width(self.settings.dtype, device=self.device)

    @property
    def may_copy(self) -> bool:
        """Whether a rank may compute with copies of its weights in the compute dtype, made after
        each step.

        A single rank does so if memory allows."""
        kept = self.training.state_bytes.weight
        alone = self.ranks == 1 and self.training.lora is None
        return alone and not self.training.weights_on_host and self.width < kept == _FLOAT32

    def sharded(self, *, copied: bool) -> bool:
        """Return whether FSDP holds the weights and gathers them in the compute dtype.

        So with several ranks, with weights on the host, and without copies if the dtypes differ."""
        return (
            self.ranks > 1
            or self.training.weights_on_host
            or (self._kept_width != self.width and not copied)
        )

    @property
    def unreduced(self) -> int:
        """The bytes of the whole model's float32 gradients if each rank adds them up during a call,
        else 0.

        They are reduced at the end of the call. Free memory has no influence, because a restored
        trainer must add in the same order."""
        several = self.ranks > 1 and self.training.lora is None  # adapters: once per step
        limit = self.settings.unreduced_gradients_bytes or _UNREDUCED_BYTES[self.device]
        size = _FLOAT32 * self.model.parameters
        return size if several and size <= limit else 0

    def lasting(self, *, copied: bool) -> dict[str, int]:
        """Return the bytes of the parts that every operation needs."""
        training, states = self.training, self.training.state_bytes
        shards = self._shards(copied=copied)
        frozen, unreduced = 0, self.unreduced
        if training.lora is not None:  # adapters are float32 and whole on every rank
            frozen, shards = self.width * _part(self.model.parameters, shards), 1
            states = TrainingSpec().state_bytes
        gradients = trained = _part(self.trained, shards)
        if training.lora is None and training.weights_on_host and self.device == "cuda":
            gradients = self.model.pinned(shards)
        moments = _part(self.moments * states.moments // 2, shards)
        if training.layout.replicas > 1 and training.lora is None and not unreduced:
            unreduced = _FLOAT32 * trained  # a replica's, until the last micro-batch of a call
        several = 1 + self.at_once if self.at_once > 1 else 1  # each thread has its own sum
        parts = {
            "frozen weights": frozen,
            "weights": states.weight * trained,
            "gradients": states.gradient * gradients * several,
            "copies": self.width * self.model.parameters if copied else 0,
            "unreduced gradients": unreduced,
            "moments": moments,
            "snapshot": states.weight * trained + moments,
        }
        return {name: size for name, size in parts.items() if size}

    def parts(self, tokens: int, *, checkpointed: bool, copied: bool) -> dict[str, int]:
        """Return the bytes of all parts during micro-batches of `tokens` tokens."""
        activations = self.at_once * self._activations(tokens, checkpointed=checkpointed)
        logits = self.at_once * self._logits(tokens)
        passing = {
            "activations": activations,
            "logits": logits,
            "gathered": self._gathered(activations + logits, copied=copied),
        }
        return self.lasting(copied=copied) | {name: size for name, size in passing.items() if size}

    def on_host(self) -> set[str]:
        """Return the parts that a GPU rank keeps in host memory."""
        if self.device == "cpu":
            return set()
        parts = {"snapshot"}
        if self.training.moments_on_host:
            parts.add("moments")
        if self.training.weights_on_host:
            full = self.training.lora is None
            parts |= {"weights", "gradients"} if full else {"frozen weights"}
        return parts

    def _shards(self, *, copied: bool) -> int:
        return self.training.layout.shards(self.ranks) if self.sharded(copied=copied) else 1

    @property
    def _kept_width(self) -> int:
        """The bytes of a number of the sharded weights."""
        return self.width if self.training.lora is not None else self.training.state_bytes.weight

    def _activations(self, tokens: int, *, checkpointed: bool) -> int:
        """A layer keeps its inputs and outputs for the backward pass.

        Checkpointed blocks keep only their inputs, and one block at a time is computed again."""
        model, layers = self.model, len(self.model.blocks)
        heads = layers * model.eager_heads // self.training.layout.tensor_parallel
        scores = _SCORES * heads * min(tokens, model.length or tokens)
        kept = tokens * (SAFETY * (model.width + model.expert_width) + scores)
        if checkpointed and layers:
            kept = tokens * layers * model.hidden + kept / layers
        return round(self.width * kept)

    def _logits(self, tokens: int) -> int:
        """Return the bytes of a logits chunk and the head's gradient, in float32 and the compute
        dtype."""
        model = self.model
        each = _logit_bytes(self.settings, device=self.device)
        chunk = min(_chunk_bytes(self.settings, self.device), each * tokens * model.vocabulary)
        head = 0 if self.training.lora else model.vocabulary * model.hidden
        return chunk + (_FLOAT32 + self.width) * head

    def _gathered(self, passing: int, *, copied: bool) -> int:
        """Return the bytes of weights and gradients that FSDP has gathered.

        It gathers the root (embeddings and head) and two other groups, one of them in advance, and
        reduces gradients by group, in float32. The root's come last and replace the `passing`
        activations."""
        if not self.sharded(copied=copied):
            return 0
        groups = [0, 0, *self._groups()]
        largest, root = max(groups), self.model.parameters - sum(groups)
        gathered = self.width * (root + sum(sorted(groups)[-2:]))
        if self.training.weights_on_host:  # a rank's part, in both dtypes
            shards = self._shards(copied=copied)
            gathered += (self._kept_width + self.width) * _part(max(largest, root), shards)
        if self.training.lora is None:
            # gloo reduces in a copy.
            each = self.width + _FLOAT32 * (2 if self.device == "cpu" and self.ranks > 1 else 1)
            gathered += max(each * largest, each * root - passing)
        return gathered

    def _groups(self) -> list[int]:
        """Return the sizes of the groups of blocks that FSDP gathers together."""
        groups, size = [], 0
        for block in self.model.blocks:
            size += block
            if size >= self.settings.shard_group_parameters:
                groups.append(size)
                size = 0
        return groups


def wanted_tokens(setting: int, *, device: str) -> int:
    return setting or _MICRO_BATCH_TOKENS[device]


def compute_width(dtype: str, *, device: str) -> int:
    return 2 if dtype == "bfloat16" or (dtype == "auto" and device == "cuda") else 4


def compiles(wanted: str, device: str) -> bool:
    """Return whether blocks are compiled. "auto" compiles on a GPU."""
    return wanted == "on" or (wanted == "auto" and device == "cuda")


def logits_rows(settings: TrainerSettings, *, device: str, vocabulary: int) -> int:
    """Return the rows of a chunk of logits. Compiled code needs less memory for one, so its chunks
    have more rows."""
    each = _logit_bytes(settings, device=device)
    return max(1, _chunk_bytes(settings, device) // (each * vocabulary))


def _chunk_bytes(settings: TrainerSettings, device: str) -> int:
    return (settings.logits_bytes or LOGITS_BYTES[device]) * _LOGIT_BYTES // _FLOAT32


def _logit_bytes(settings: TrainerSettings, *, device: str) -> int:
    """Compiled code has only logits and their gradients, in the compute dtype."""
    if compiles(settings.compile, device):
        return 2 * compute_width(settings.dtype, device=device)
    return _LOGIT_BYTES


def _part(elements: int, shards: int) -> int:
    return math.ceil(elements / shards)


# --- The choice -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Available:
    """The bytes that one rank may use. On a CPU all are in `device`."""

    device: int
    host: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """The chosen micro-batch, and a rank's bytes by part on its `device` and `host`.

    On a CPU all bytes are in `device`. All ranks have the same plan. A micro-batch of
    `checkpointed_from` tokens ran out of memory without checkpointed blocks."""

    micro_batch_tokens: int
    checkpointing: bool
    device: Mapping[str, int]
    available: Available
    host: Mapping[str, int] = field(default_factory=dict)
    checkpointed_from: int = sys.maxsize

    @property
    def copied(self) -> bool:
        """Whether the rank computes with copies of its weights."""
        return "copies" in self.device

    def checkpoints(self, tokens: int) -> bool:
        """Return whether to checkpoint. One sequence may exceed a planned micro-batch, and its
        activations grow with it."""
        if tokens >= self.checkpointed_from:
            return True
        if self.checkpointing or tokens <= self.micro_batch_tokens:
            return self.checkpointing
        activations = self.device.get("activations", 0)
        more = activations * tokens // self.micro_batch_tokens - activations
        return sum(self.device.values()) + more > self.available.device


def choose(memory: TrainerMemory, available: Available) -> MemoryPlan:
    """Return the plan with the largest micro-batch up to the wanted one, halved until it fits.

    Blocks are checkpointed only if `PLAIN_TOKENS` do not fit otherwise. Weights are copied only if
    that makes no micro-batch smaller. Raises `WorkerStartFailed` with the numbers."""
    wanted, checkpointing = memory.wanted_tokens, memory.settings.checkpointing
    least = min(LEAST_TOKENS, wanted)
    halves = [wanted >> times for times in range(wanted.bit_length()) if wanted >> times >= least]
    tries = [(tokens, checkpointing != "off") for tokens in halves]
    if checkpointing == "auto":
        plain = min(PLAIN_TOKENS, wanted)
        tries = [(tokens, False) for tokens in halves if tokens >= plain] + tries
    for tokens, checkpointed in tries:
        for copied in (True, False) if memory.may_copy else (False,):
            plan = _plan(memory, tokens, available, checkpointed=checkpointed, copied=copied)
            if not (missing := _missing(plan)):
                return plan
    refusal = f"{_refusal(plan, missing)}. What helps: {', '.join(_what_helps(memory))}"
    raise WorkerStartFailed(refusal)


def _plan(
    memory: TrainerMemory, tokens: int, available: Available, *, checkpointed: bool, copied: bool
) -> MemoryPlan:
    parts = memory.parts(tokens, checkpointed=checkpointed, copied=copied)
    on_host = memory.on_host()
    return MemoryPlan(
        micro_batch_tokens=tokens,
        checkpointing=checkpointed,
        device={name: size for name, size in parts.items() if name not in on_host},
        host={name: size for name, size in parts.items() if name in on_host},
        available=available,
    )


def _missing(plan: MemoryPlan) -> str:
    """Return "host", "device" or ""."""
    if sum(plan.host.values()) > plan.available.host:
        return "host"
    return "device" if sum(plan.device.values()) > plan.available.device else ""


def _refusal(plan: MemoryPlan, missing: str) -> str:
    parts: Mapping[str, int] = getattr(plan, missing)
    of = "host" if missing == "host" or not plan.available.host else "GPU"
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in largest_first)
    blocks = "checkpointed blocks" if plan.checkpointing else "blocks that keep all"
    return (
        f"the model does not fit into memory: with {plan.micro_batch_tokens} tokens at a time and "
        f"{blocks}, each rank needs {_gib(sum(parts.values()))} GiB of its {of} ({listed}), "
        f"and may use {_gib(getattr(plan.available, missing))} GiB"
    )


def _what_helps(memory: TrainerMemory) -> list[str]:
    """Return the changes that make a model fit, and their settings."""
    training, gpu = memory.training, memory.device == "cuda"
    helps = ["more ranks" if gpu else "more memory, or ranks on more hosts"]
    if training.layout.replicas > 1:
        helps.append(f"one copy of the model on all ranks (tandem.shards={memory.ranks})")
    if training.lora is None:
        helps.append("LoRA")
    if training.lora is None and training.optimizer == "adamw":
        if training.states == "float32":
            helps.append("states in bfloat16 (tandem.states)")
        if training.offload == "none" and gpu:
            helps.append("moments on the host (tandem.offload=moments)")
    offloads = training.optimizer == "adamw" or training.lora is not None
    if offloads and not training.weights_on_host and gpu:
        helps.append("weights on the host, too (tandem.offload=weights)")
    if memory.width == 4:
        helps.append("bfloat16 (TANDEM_TRAINER_DTYPE)")
    return helps


def _gib(size: int) -> str:
    return f"{size / _GIB:.3g}"
