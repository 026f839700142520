"""The built-in backend: any Hugging Face causal model, fully sharded by torch's FSDP2."""

from __future__ import annotations

import copy
import functools
import gc
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from tandem.backends.memory import MemoryPlan, compiles, logits_rows
from tandem.errors import InvalidRequest, WorkerStartFailed
from tandem.protocol.worker import TrainingSpec
from tandem.settings.workers import TrainerSettings
from tandem.telemetry import get_log
from trainer_service.backends.base import (
    Capability,
    Export,
    Gradients,
    LiveState,
    Mark,
    TrainerBackend,
    World,
    add_gradients,
)
from trainer_service.backends.copies import CopiedWeights
from trainer_service.backends.exporting import WholeWeights
from trainer_service.backends.loop import (
    Done,
    MicroBatchBackend,
    MicroBatchTask,
    Objective,
    ShareResult,
    compute_share,
)
from trainer_service.backends.planning import at_once, memory_of, plan_memory
from trainer_service.backends.sharding import RankMesh, ShardGroups
from trainer_service.backends.token_logprobs import TokenLogprobs
from trainer_service.batches.micro_batches import (
    MicroBatch,
    RankPlan,
    micro_batches_to_compile,
)
from trainer_service.batches.validation import Batch
from trainer_service.lora.adapters import ActiveAdapters, chooses_experts, freeze
from trainer_service.lora.run_adapters import RunAdapters
from trainer_service.losses.base import LossResult
from trainer_service.models.activation_checkpointing import Checkpointing
from trainer_service.models.compiled_blocks import (
    compile_blocks,
    compiling,
    mask_windows,
    not_yet,
)
from trainer_service.models.huggingface import (
    check_causal,
    check_trainable,
    facts_of,
    find_blocks,
    group_blocks,
    load_model,
    persistent_buffers,
    small_model,
)
from trainer_service.models.logprobs import comes_apart
from trainer_service.models.packing import pack, why_not_packed
from trainer_service.models.tensor_parallel import compare_divided, divide_matrices
from trainer_service.optimizers import local, make_optimizer, outer_parameters
from trainer_service.optimizers.staged import pin

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


_JOINT_TOKENS = 16
_COMPILE_THREADS = 8
"""The most compile threads of one rank."""


def torch_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


class Fsdp2Backend(TrainerBackend):
    """Float32 master weights, sharded over ranks. Computes in `dtype`, reduces in float32.

    LoRA runs freeze the weights, keep them in `dtype`, and can share them, each with its own
    backend object. Adapters are float32 and whole on every rank. The ranks sum their gradients
    themselves, because FSDP's set of parameters is fixed while adapters come and go.

    A single rank keeps a plain module, which is faster for a small model. In bfloat16 it computes
    with copies of its float32 weights, made after each step. If they do not fit into memory, FSDP
    casts a group at a time, with equal bits. FSDP also handles states in bfloat16 with computation
    in float32, and a single rank's weights on the host."""

    capabilities = frozenset(Capability)

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
        whole = world.size == 1 and not self.training.weights_on_host
        # Several threads would add up gradients in bfloat16.
        self.threads = whole and world.device == "cpu" and not self._casts
        self._compiled = compiles(settings.compile, world.device)
        self._warm: set[str] = set()  # of all runs that share the model
        training = self.training
        check_trainable(model_path)
        memory = memory_of(
            model_path,
            training=training,
            settings=settings,
            world=world,
            at_once=at_once(self, settings, threads=torch.get_num_threads()),
        )
        self.plan: MemoryPlan = plan_memory(memory, world=world)
        self._copied = self.plan.copied
        self._sharded = memory.sharded(copied=self._copied)
        self._reduces_once = memory.unreduced > 0

        timeout = timedelta(seconds=settings.collective_timeout)
        self._mesh = RankMesh(world, training.layout, timeout=timeout) if self._sharded else None

        if self._mesh is not None and self._mesh.tensor is not None:
            self._try_dividing(model_path, self._mesh.tensor)

        load_model(
            model_path,
            prepare=functools.partial(self._prepare, settings),
            on_host=training.weights_on_host,
        )
        self._to_device()
        self._whole_weights = WholeWeights(self._model, self._groups, dtype=torch_dtype(self.dtype))
        with not_yet(self._compiled):
            self._try_out(model_path, settings)
        self._begin(training)
        self.activate()

    # --- The run ---------------------------------------------------------------------------

    def _begin(self, training: TrainingSpec) -> None:
        self.training = training
        self._choose_trainable(training)
        self.optimizer = make_optimizer(
            training,
            self._trainable,
            outer=self._outer,
            device=self.device,
            sum_over_ranks=_sum_over_one_rank if training.lora else self._sum_over_ranks,
        )

    def _choose_trainable(self, training: TrainingSpec) -> None:
        self._model.requires_grad_(training.lora is None)
        self._copies = None
        if self._copied:
            self._copies = CopiedWeights(self._model, dtype=torch_dtype(self.dtype))
        self._trainable = (
            self._copies.masters if self._copies else dict(self._model.named_parameters())
        )
        self._outer = outer_parameters(self._model)
        self._adapters = RunAdapters(self._model, training.lora, device=self._device)
        if training.lora is not None:
            self._trainable = self._adapters.parameters()
            trainable = sum(parameter.numel() for parameter in self._trainable.values())
            self.facts = replace(self.facts, trainable_parameters=trainable)
            tables = {name.rpartition(".")[0] for name in self._outer}
            self._outer = frozenset(n for n in self._trainable if n.rpartition(".")[0] in tables)

    def share(self, training: TrainingSpec) -> TrainerBackend:
        if self.training.lora is None or training.lora is None:
            raise InvalidRequest(
                "this trainer's model is trained by one run, and another one cannot share it: only "
                "LoRA runs share a model"
            )
        if training.offload != self.training.offload:
            raise InvalidRequest(
                f"the run asks for the offload {training.offload!r}, and this trainer's model has "
                f"{self.training.offload!r}: runs that share a model need the same offload"
            )
        if training.layout != self.training.layout:
            raise InvalidRequest(
                f"the run asks for the layout {training.layout}, and this trainer's model has "
                f"{self.training.layout}: runs that share a model need the same layout"
            )
        other = copy.copy(self)
        other._begin(training)
        return other

    def activate(self) -> None:
        self._active.activate(self._adapters.by_module)

    # --- Loading and sharding --------------------------------------------------------------

    def _prepare(self, settings: TrainerSettings, model: nn.Module) -> None:
        """Prepare the model while its parameters have no memory yet."""
        self._model = model
        self._active = ActiveAdapters()
        self.facts = facts_of(model)
        blocks = find_blocks(model) if self._sharded else []
        self._groups = ShardGroups(
            model, group_blocks(blocks, minimum=settings.shard_group_parameters)
        )
        if self.training.lora is not None:
            freeze(model, self._active)  # recorded names stay valid
            self._keep_in(torch_dtype(self.dtype))
        else:
            self._keep_in(torch_dtype(self.training.states))
        if self._compiled:
            compile_blocks(find_blocks(model), threads=self._compile_threads)
        if self._mesh is not None and self._mesh.tensor is not None:
            divide_matrices(model, self._mesh.tensor)
        self._checkpointing = Checkpointing(
            [] if settings.checkpointing == "off" else find_blocks(model)
        )
        if self._mesh is not None:
            compute = torch_dtype(self.dtype) if self._casts else None
            self._groups.shard(
                self._mesh.data, dtype=compute, on_host=self.training.weights_on_host
            )

    def _to_device(self) -> None:
        if not self.training.weights_on_host:
            self._model.to(self._device)
            return
        for part in self._groups.even_parts() if self.device != "cpu" else ():
            pin(part)  # FSDP pins the tensors that it moves
        for buffer in self._model.buffers():
            buffer.data = buffer.to(self._device)

    @property
    def _compile_threads(self) -> int:
        """The number of kernels compiled at once. Each compile thread is a process and takes a
        core."""
        if self._world.device == "cpu":
            return 1
        ranks = self._world.on_node or self._world.size
        return max(1, min(_COMPILE_THREADS, len(os.sched_getaffinity(0)) // ranks))

    @property
    def _casts(self) -> bool:
        return (self.dtype, self.training.states) != ("float32", "float32")

    def _try_out(self, path: Path, settings: TrainerSettings) -> None:
        """Check that the model is causal. Find out whether it packs and can end at its hidden
        states.

        For several ranks, or types other than float32, a small model of the same class is tested.
        """
        small = small_model(path) if self._sharded or self._casts else None
        model = self._model if small is None else small
        check_causal(model)
        tried = model
        if small is not None and self.device != "cpu":
            # A GPU's kernel takes neither every type nor every size of heads.
            tried = copy.deepcopy(small).to(self.device, torch_dtype(self.dtype))
        wanted = settings.packing == "on"
        reason = why_not_packed(tried, device=self.device) if wanted else ""
        self.packs = wanted and not reason
        if reason and self._world.rank == 0:
            get_log().info("rows_padded", reason=reason, dtype=self.dtype, device=self.device)
        if self.packs and small is not None:
            pack(self._model)
        if self._compiled and not self.packs:
            mask_windows(self._model)
        self._logprobs = TokenLogprobs(
            self._model,
            self._active,
            facts=self.facts,
            device=self.device,
            apart=comes_apart(model),
            rows=logits_rows(settings, device=self.device, vocabulary=self.facts.vocabulary),
            compiled=self._compiled,
        )
        self._joins = (
            self.packs
            and self._world.size == 1
            and self._mesh is None
            and not self._compiled
            and self.training.lora is not None
            and not chooses_experts(self._model)
        )
        self._groups.reshard()

    def _try_dividing(self, path: Path, mesh: DeviceMesh) -> None:
        if (small := small_model(path, times=mesh.size())) is None:
            raise WorkerStartFailed(
                f"tandem.tensor_parallel does not suit {path.name}: its configuration makes no "
                "small model, so Tandem cannot check that divided matrices compute the same. Set "
                "it to 1"
            )
        compare_divided(small, mesh)

    def _keep_in(self, dtype: torch.dtype) -> None:
        for parameter in self._model.parameters():
            parameter.data = parameter.data.to(dtype)

    def _sum_over_ranks(self, value: Tensor) -> None:
        if self._mesh is not None and self._world.size > 1:
            total = value.to(self._device)  # collectives need the device
            self._mesh.sum_over_replica(total)
            value.copy_(total)

    # --- Computing -------------------------------------------------------------------------

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        return [] if self._mesh is None else self._mesh.groups()

    @property
    def warm(self) -> bool:
        return not self._compiled or self._shape in self._warm

    @property
    def _shape(self) -> str:
        """The part of the specification that compiled code depends on."""
        lora = self.training.lora
        return "" if lora is None else lora.model_dump_json(exclude={"seed"})

    def warm_up(self) -> None:
        kinds = micro_batches_to_compile(
            packed=self.packs,
            vocabulary=self.facts.vocabulary,
            max_length=self.facts.max_length,
        )
        with compiling(self.facts.architecture):
            for micro_batch in kinds:
                self.backward(self.logprobs(micro_batch, gradients=True).sum())
                self.logprobs(micro_batch, gradients=False)
        self.optimizer.drop_gradients()
        self._warm.add(self._shape)

    def forward_backward(self, batch: Batch, share: RankPlan, *, done: Done) -> ShareResult:
        """Sum gradients over replicas only with the last micro-batch.

        The ranks of one replica do so too if each has memory for gradients of the whole model."""
        if not self._reduces_once and self.training.layout.replicas == 1:
            return super().forward_backward(batch, share, done=done)
        left = len(share)

        def keep(loss: Tensor) -> None:
            nonlocal left
            left -= 1
            self._groups.reduce_with_next_backward(
                in_replica=left == 0 or not self._reduces_once, between_replicas=left == 0
            )
            self.backward(loss)

        return compute_share(self, batch, share, keep=keep, done=done)

    def logprobs(self, micro_batch: MicroBatch, *, gradients: bool) -> Tensor:
        self._choose_checkpointing(micro_batch)
        with torch.set_grad_enabled(gradients):
            chosen = self._logprobs.logprobs_of(micro_batch)
        if not gradients:
            # Without a backward pass nothing reshards the root, and after the next step a forward
            # pass would use the old weights.
            self._groups.reshard()
        return chosen

    def loss_of(
        self, micro_batch: MicroBatch, objective: Objective, *, by_entry: bool
    ) -> tuple[Tensor, LossResult]:
        if not by_entry or not self._logprobs.in_chunks(micro_batch.tokens.size):
            return super().loss_of(micro_batch, objective, by_entry=by_entry)
        self._choose_checkpointing(micro_batch)
        return self._logprobs.with_gradients(micro_batch, objective)

    def joins(self, tokens: int, *, by_entry: bool) -> bool:
        """Compiled code has one adapter in each layer, and a layer of experts gets some rows only.

        With fewer tokens, libraries multiply matrices in another way, so bits would differ."""
        return (
            self._joins
            and tokens >= _JOINT_TOKENS
            and not self.plan.checkpoints(tokens)
            and (by_entry or not self._logprobs.in_chunks(tokens))
        )

    def losses_of(
        self, runs: Sequence[MicroBatchBackend], tasks: Sequence[MicroBatchTask]
    ) -> list[tuple[Tensor, LossResult]]:
        self._checkpointing.on = False
        adapters = [run._adapters.by_module for run in runs if isinstance(run, Fsdp2Backend)]
        return self._logprobs.of_runs(tasks, adapters)

    def joint_pass(self) -> AbstractContextManager[None]:
        return self._active.joint_pass()

    @property
    def trained(self) -> Sequence[nn.Parameter]:
        return list(self._trainable.values())

    def _choose_checkpointing(self, micro_batch: MicroBatch) -> None:
        """Checkpointing does not change the bits."""
        self._checkpointing.on = self.plan.checkpoints(micro_batch.tokens.size)

    def checkpoint(self, tokens: int) -> bool:
        if self._checkpointing.impossible or self.plan.checkpoints(tokens):
            return False
        self.plan = replace(self.plan, checkpointed_from=tokens)
        return True

    def gradients(self, loss: Tensor) -> Gradients:
        return list(torch.autograd.grad(loss, self.trained, allow_unused=True))

    def accumulate(self, gradients: Gradients) -> None:
        if not gradients:
            return
        parameters = self.trained
        total = add_gradients([parameter.grad for parameter in parameters], gradients)
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient

    def sum_gradients(self) -> None:
        if self._world.size > 1:
            self._adapters.sum_gradients()

    def weights_changed(self) -> None:
        if self._copies is not None:
            self._copies.refresh()

    def mark(self) -> Mark:
        return [
            (each, each.grad, 0 if each.grad is None else local(each.grad)._version)
            for each in self._trainable.values()
        ]

    def undo(self, mark: Mark) -> bool:
        """A write into a tensor raises its version. A gradient of unchanged version is intact."""
        self._groups.forget_backward()
        intact = True
        for parameter, gradient, version in mark:
            parameter.grad = gradient
            intact &= gradient is None or local(gradient)._version == version
        gc.collect()  # errors hold the frames and tensors of the failed attempt
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return intact

    def live_state(self) -> LiveState:
        # A loss that failed after its forward pass has left the root gathered.
        self._groups.reshard()
        parameters = list(dict.fromkeys([*self._model.parameters(), *self._trainable.values()]))
        return LiveState(
            optimizer=list(self.optimizer.state(create=False).values()),
            gradients=[each.grad for each in parameters if each.grad is not None],
            parameters=[*parameters, *self._model.buffers()],
        )

    # --- Exporting -------------------------------------------------------------------------

    def parameters(self) -> dict[str, Tensor]:
        named = {name: tensor.detach() for name, tensor in self._trainable.items()}
        return named if self.training.lora else {**named, **persistent_buffers(self._model)}

    def exports(self) -> Sequence[Export]:
        return self._whole_weights.exports

    def export_weights(self, units: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        return self._whole_weights.tensors_of(units)

    @property
    def exports_stay(self) -> bool:
        return not self._sharded and self._whole_weights.are_parameters

    def export_adapter(self) -> Mapping[str, Tensor]:
        return {} if self._world.rank else self._adapters.files()

    def adapter_targets(self) -> Sequence[str]:
        return self._adapters.targets


def _sum_over_one_rank(value: Tensor) -> None:
    """No sum: every rank has the whole value."""
