"""The built-in backend: any Hugging Face causal model, fully sharded by torch's FSDP2."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tandem.settings import TrainerSettings
from tandem.telemetry import get_log
from tandem.worker import LoraSpec, TrainingSpec
from trainer_service.backends.base import (
    Gradients,
    LiveState,
    Mark,
    Objective,
    TrainerBackend,
    World,
    add_gradients,
)
from trainer_service.batches.micro_batches import MicroBatch
from trainer_service.lora.adapters import (
    ActiveAdapters,
    Adapter,
    freeze,
    key_of,
    kinds_without_layers,
    merged,
    new_adapters,
    target_names,
)
from trainer_service.losses.base import LossResult
from trainer_service.models.activation_checkpointing import checkpoint_blocks
from trainer_service.models.huggingface import (
    facts_of,
    find_blocks,
    group_blocks,
    load_model,
    persistent_buffers,
)
from trainer_service.models.logprobs import ChunkedLogprobs, divide
from trainer_service.models.packing import can_pack
from trainer_service.optimizers import local, make_optimizer, outer_parameters

if TYPE_CHECKING:
    from torch import Tensor


_LOGITS_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}


def torch_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


class Fsdp2Backend(TrainerBackend):
    """Float32 master weights, sharded over ranks; computes in `dtype`, reduces in float32.

    LoRA runs freeze the weights, which are kept in `dtype`, and can share them: there is a backend
    for each run upon one model, which computes with the adapters of the run that is active. These
    are float32 and lie whole on every rank, which sums their gradients itself, once for each step:
    they come and go, while what is sharded cannot change.

    A single rank that computes in float32 has nothing to shard or cast: its model stays a plain
    module, which for a small model is 2 to 5 % faster than a group of one rank.
    """

    def __init__(
        self,
        *,
        model_path: Path,
        settings: TrainerSettings,
        world: World,
        training: TrainingSpec | None = None,
    ) -> None:
        self._world = world
        self.training = training or TrainingSpec()
        self.device = world.device
        self._device = torch.device(world.device)
        default = "bfloat16" if world.device == "cuda" else "float32"
        self.dtype: str = default if settings.dtype == "auto" else settings.dtype
        self._active = ActiveAdapters()
        training = training or TrainingSpec()

        def prepare(model: nn.Module) -> None:
            """While the parameters have no memory yet."""
            self._model = model
            self.facts = facts_of(model)
            self._record_groups(settings.shard_group_parameters)
            if training.lora is not None:
                self._freeze()
            if settings.checkpointing == "on":
                checkpoint_blocks(find_blocks(model))
            if self._sharded:
                self._shard()

        load_model(model_path, prepare=prepare)
        self._model.to(self._device)  # buffers, and what is not sharded
        self._model.requires_grad_(training.lora is None)
        self._record_units()
        self.packs = self._may_pack(settings) and can_pack(self._model)
        self._divide(settings)
        if self._sharded:
            self._model.reshard()
        self._begin(training)
        self.activate()

    # --- The run ---------------------------------------------------------------------------

    def _begin(self, training: TrainingSpec) -> None:
        """Makes everything that is of one run alone."""
        self.training = training
        self._adapters: dict[str, Adapter] = {}
        self._second_names: dict[str, str] = {}
        self._trainable = dict(self._model.named_parameters())
        outer = outer_parameters(self._model)
        sum_over_ranks = self._sum_over_ranks
        if training.lora is not None:
            self._adapt(training.lora)
            tables = {name.rpartition(".")[0] for name in outer}
            outer = frozenset(n for n in self._trainable if n.rpartition(".")[0] in tables)
            sum_over_ranks = _sum_over_one_rank
        self.optimizer = make_optimizer(
            training.optimizer, self._trainable, outer=outer, sum_over_ranks=sum_over_ranks
        )

    def _adapt(self, lora: LoraSpec) -> None:
        names = [name for name, _ in self._model.named_modules()]
        self._adapters = new_adapters(self._model, lora, device=self._device)
        if self._world.rank == 0 and (kinds := kinds_without_layers(self._model, lora)):
            get_log().warning("lora_without_layers", kinds=kinds)
        self._targets = target_names(list(self._adapters), all_modules=names)
        self._trainable = {
            f"{name}.lora_{side}": parameter
            for name, adapter in self._adapters.items()
            for side, parameter in (("A", adapter.lora_A), ("B", adapter.lora_B))
        }
        first = {parameter: name for name, parameter in self._model.named_parameters()}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            # A tied weight's second name: once merged, an adapted head differs from the embedding.
            if first[parameter] != name and name.rpartition(".")[0] in self._adapters:
                self._second_names[name] = first[parameter]
        trainable = sum(parameter.numel() for parameter in self._trainable.values())
        self.facts = replace(self.facts, trainable_parameters=trainable)

    def share(self, training: TrainingSpec) -> TrainerBackend:
        if self.training.lora is None or training.lora is None:
            return super().share(training)
        other = copy.copy(self)
        other._begin(training)
        return other

    def activate(self) -> None:
        self._active.by_module = self._adapters

    # --- Loading and sharding --------------------------------------------------------------

    def _may_pack(self, settings: TrainerSettings) -> bool:
        return settings.packing == "on" or (settings.packing == "auto" and self.device == "cpu")

    @property
    def _sharded(self) -> bool:
        return self._world.size > 1 or self.dtype != "float32"

    def _record_groups(self, minimum: int) -> None:
        """Records each parameter's group before sharding changes the modules."""
        blocks = find_blocks(self._model)
        self._groups = group_blocks(blocks, minimum=minimum) if self._sharded else []
        group_of = {
            parameter: index
            for index, group in enumerate(self._groups)
            for block in group
            for parameter in block.parameters()
        }
        self._group_names: list[list[str]] = [[] for _ in range(len(self._groups) + 1)]
        for name, parameter in self._model.named_parameters():  # a tied weight comes once
            self._group_names[group_of.get(parameter, -1)].append(name)

    def _record_units(self) -> None:
        """Records the size of each unit, once it is known how the files are laid out."""
        blocks = find_blocks(self._model) if self._converts else []
        self._block_prefixes = self._prefixes(blocks)
        self._sizes: dict[str, int] = {}
        for name, parameter in self._model.named_parameters():
            unit = self._unit(name)
            self._sizes[unit] = self._sizes.get(unit, 0) + parameter.numel()

    @property
    def _converts(self) -> bool:
        """Whether the model's files differ in layout from its modules (fused experts)."""
        return bool(getattr(self._model, "_weight_conversions", None))

    def _prefixes(self, blocks: list[nn.Module]) -> dict[nn.Module, str]:
        names = {module: name for name, module in self._model.named_modules()}
        return {block: names[block] for block in blocks}

    def _unit(self, name: str) -> str:
        """A unit is one tensor, or a whole block if the files combine several of its tensors."""
        for prefix in self._block_prefixes.values():
            if name.startswith(f"{prefix}."):
                return prefix
        return name

    def _divide(self, settings: TrainerSettings) -> None:
        """Lets the model end at its hidden states, and makes what takes log probabilities of
        them."""
        logits_of, tail = divide(self._model)
        of_row = 4 * self.facts.vocabulary
        rows = max(1, (settings.logits_bytes or _LOGITS_BYTES[self.device]) // of_row)
        if logits_of is None:
            get_log().warning("logits_whole", architecture=self.facts.architecture)
            logits_of, rows = _as_they_are, sys.maxsize
        self._tail = tail
        self._logprobs = ChunkedLogprobs(logits_of, self._of_tail, rows=rows)

    def _of_tail(self) -> list[nn.Parameter]:
        """The trainable parameters that logits are made with, those of adapters included."""
        own = [p for part in self._tail.values() for p in part.parameters() if p.requires_grad]
        for name, adapter in self._active.by_module.items():
            if name.partition(".")[0] in self._tail:
                own += [adapter.lora_A, adapter.lora_B]
        return own

    def _freeze(self) -> None:
        """Recorded names stay valid."""
        freeze(self._model, self._active)
        for parameter in self._model.parameters():
            parameter.data = parameter.data.to(torch_dtype(self.dtype))

    def _shard(self) -> None:
        mesh = init_device_mesh(self._world.device, (self._world.size,))
        compute = torch_dtype(self.dtype)
        policy = MixedPrecisionPolicy(
            param_dtype=None if compute == torch.float32 else compute, reduce_dtype=torch.float32
        )
        for group in self._groups:
            fully_shard(group, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        # Backward needs the root's parameters (embeddings, head) first, so they stay gathered.
        fully_shard(self._model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        for module in self._fsdp_modules():
            # Losses are sums over all datums, so gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def _fsdp_modules(self) -> Iterator[FSDPModule]:
        yield from (group[0] for group in self._groups)
        yield self._model

    def _sum_over_ranks(self, value: Tensor) -> None:
        if self._world.size > 1:
            dist.all_reduce(value)

    # --- Computing -------------------------------------------------------------------------

    def logprobs(self, micro_batch: MicroBatch, *, gradients: bool) -> Tensor:
        with torch.set_grad_enabled(gradients):
            chosen = self._logprobs(self._hidden_of(micro_batch), self._targets_of(micro_batch))
            chosen = chosen.reshape(-1)
            if micro_batch.select is not None:
                chosen = chosen.index_select(0, self.to_device(micro_batch.select))
        if not gradients and self._sharded:
            # Without a backward nothing reshards the root, and after the next step a forward would
            # still use the old weights.
            self._model.reshard()
        return chosen

    def loss_of(
        self, micro_batch: MicroBatch, objective: Objective, *, by_entry: bool
    ) -> tuple[Tensor, LossResult]:
        if not by_entry or micro_batch.tokens.size <= self._logprobs.rows:
            return super().loss_of(micro_batch, objective, by_entry=by_entry)

        def gradient_of(logprobs: Tensor) -> Tensor:
            with torch.enable_grad():
                leaf = logprobs.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(objective(leaf).loss, leaf)
            return gradient

        select = None if micro_batch.select is None else self.to_device(micro_batch.select)
        logprobs, carrier = self._logprobs.with_gradients(
            self._hidden_of(micro_batch),
            self._targets_of(micro_batch),
            select=select,
            gradient_of=gradient_of,
        )
        result = objective(logprobs)
        return logprobs, replace(result, loss=result.loss + carrier)

    def _hidden_of(self, micro_batch: MicroBatch) -> Tensor:
        """The hidden states [rows, hidden] of all tokens. No attention mask: a causal model's
        real tokens never see padding on the right."""
        extra: dict[str, object] = {}
        if micro_batch.positions is not None:
            extra = {
                "position_ids": self.to_device(micro_batch.positions),
                "run_lengths": micro_batch.run_lengths,
            }
        tokens = self.to_device(micro_batch.tokens)
        hidden: Tensor = self._model(input_ids=tokens, use_cache=False, **extra)
        return hidden.flatten(0, 1)

    def _targets_of(self, micro_batch: MicroBatch) -> Tensor:
        return self.to_device(micro_batch.targets).flatten(0, 1)

    def gradients(self, loss: Tensor) -> Gradients:
        parameters = list(self._trainable.values())
        return list(torch.autograd.grad(loss, parameters, allow_unused=True))

    def accumulate(self, gradients: Gradients) -> None:
        if not gradients:
            return
        parameters = list(self._trainable.values())
        total = add_gradients([parameter.grad for parameter in parameters], gradients)
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient

    def sum_gradients(self) -> None:
        """One collective for all adapters. A gradient that a rank lacks is zero there; one that all
        ranks lack stays absent."""
        if self._world.size == 1 or not self._adapters:
            return
        parameters = list(self._trainable.values())
        parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        held = torch.tensor([float(each.grad is not None) for each in parameters])
        flat = torch.cat([*(part.flatten() for part in parts), held.to(self._device)])
        dist.all_reduce(flat)
        *sums, ranks = flat.split([*(part.numel() for part in parts), len(parts)])
        for parameter, total, held_by in zip(parameters, sums, ranks.tolist(), strict=True):
            parameter.grad = total.view_as(parameter) if held_by else None

    def mark(self) -> Mark:
        return [
            (each, each.grad, 0 if each.grad is None else local(each.grad)._version)
            for each in self._trainable.values()
        ]

    def undo(self, mark: Mark) -> bool:
        """What is written into a tensor raises its version. Where the backward has not come so
        far, the gradients held are intact."""
        if self._sharded:
            self._model.reset_iter_state()
            for module in self._fsdp_modules():
                module.unshard()  # of the block that failed, some gradients were not reduced yet
                for parameter in self._model.parameters():
                    parameter.grad = None
                module.reshard()
        intact = True
        for parameter, gradient, version in mark:
            parameter.grad = gradient
            intact &= gradient is None or local(gradient)._version == version
        gc.collect()  # errors hold the frames, and those the tensors, of what failed
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return intact

    @property
    def threadsafe(self) -> bool:
        return not self._sharded and self.device == "cpu"

    def live_state(self) -> LiveState:
        if self._sharded:
            # A loss that failed after its forward pass has left the root gathered.
            for module in self._fsdp_modules():
                module.reshard()
        parameters = list(dict.fromkeys([*self._model.parameters(), *self._trainable.values()]))
        return LiveState(
            optimizer=list(self.optimizer.state(create=False).values()),
            gradients=[each.grad for each in parameters if each.grad is not None],
            parameters=[*parameters, *self._model.buffers()],
        )

    # --- Collecting ------------------------------------------------------------------------

    def parameters(self) -> dict[str, Tensor]:
        named = {name: tensor.detach() for name, tensor in self._trainable.items()}
        return named if self._adapters else {**named, **persistent_buffers(self._model)}

    def tensor_sizes(self) -> Mapping[str, int]:
        own = {name: self._sizes[first] for name, first in self._second_names.items()}
        return {**self._sizes, **own}

    def collect(self, *, dtype: str, owned_by_me: Callable[[str], bool]) -> dict[str, Tensor]:
        """Gathers one group after the other, so that no rank holds the whole model at once."""
        collected: dict[str, Tensor] = {}
        modules: list[FSDPModule | None] = [None]
        if self._sharded:
            modules = list(self._fsdp_modules())
        for module, group in zip(modules, self._group_names, strict=True):
            second = [name for name, first in self._second_names.items() if first in group]
            names = [*group, *second]
            if module is not None:
                module.unshard()
            mine = {name: self._merged(name) for name in names if owned_by_me(self._unit(name))}
            for name, tensor in self._file_layout(mine).items():
                collected[name] = tensor.to(
                    device="cpu", dtype=torch_dtype(dtype), copy=True
                ).contiguous()
            if module is not None:
                module.reshard()
        if self._world.rank == 0:
            for name, buffer in persistent_buffers(self._model).items():
                collected[name] = buffer.detach().cpu().contiguous()
        return collected

    def _merged(self, name: str) -> Tensor:
        """A parameter, with its adapter merged in. Its group must be gathered."""
        parameter = self._model.get_parameter(name).detach()
        module, _, kind = name.rpartition(".")
        if kind != "weight" or (adapter := self._adapters.get(module)) is None:
            return parameter
        a, b = adapter.lora_A.detach(), adapter.lora_B.detach()
        return merged(parameter, a=a, b=b, scale=adapter.scale)

    def collect_adapter(self) -> dict[str, Tensor]:
        if self._world.rank:
            return {}
        return {
            key_of(name, side=side): parameter.detach().cpu().contiguous()
            for name, adapter in self._adapters.items()
            for side, parameter in (("A", adapter.lora_A), ("B", adapter.lora_B))
        }

    def adapter_targets(self) -> Sequence[str]:
        return self._targets

    @property
    def unties_head(self) -> bool:
        return bool(self._second_names)

    def _file_layout(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Converts names and shapes to those of the model's own files."""
        if not self._converts or not tensors:
            return tensors
        from transformers.core_model_loading import revert_weight_conversion

        reverted: dict[str, Tensor] = revert_weight_conversion(self._model, tensors)
        return reverted


def _as_they_are(logits: Tensor) -> Tensor:
    """Of a model that returns its logits itself."""
    return logits


def _sum_over_one_rank(value: Tensor) -> None:
    """Of what every rank has whole."""


BACKEND = Fsdp2Backend
