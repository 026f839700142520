"""A trainer backend of another package: a plain float32 model on every rank, without FSDP."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tandem.errors import WorkerStartFailed
from tandem.protocol.worker import TrainingSpec
from tandem.settings.workers import TrainerSettings
from tandem.telemetry import get_log
from trainer_service.backends import TrainerBackend, World
from trainer_service.backends.base import Export
from trainer_service.backends.loop import Done, ShareResult
from trainer_service.batches.micro_batches import MicroBatch, RankPlan
from trainer_service.batches.validation import Batch
from trainer_service.models.huggingface import facts_of
from trainer_service.optimizers import make_optimizer, outer_parameters

if TYPE_CHECKING:
    from torch import Tensor


class PlainBackend(TrainerBackend):
    def __init__(
        self,
        *,
        model_path: Path,
        settings: TrainerSettings,
        world: World,
        training: TrainingSpec | None = None,
    ) -> None:
        self.training = training or TrainingSpec()
        if "bfloat16" in (settings.dtype, self.training.states):
            raise WorkerStartFailed("the backend plain computes in float32 alone")
        self.dtype, self.device = "float32", world.device
        self._ranks = world.size
        model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, local_files_only=True
        )
        self.model = model.eval().to(world.device)
        self.facts = facts_of(self.model)
        self.optimizer = make_optimizer(
            self.training,
            self.parameters(),
            outer=outer_parameters(self.model),
            device=self.device,
            sum_over_ranks=lambda value: None,  # every rank has all gradients
        )
        get_log().info("plain_model_loaded", rank=world.rank)

    def forward_backward(self, batch: Batch, share: RankPlan, *, done: Done) -> ShareResult:
        """Without collectives, a rank skips its empty micro-batches."""
        return super().forward_backward(batch, tuple(filter(None, share)), done=done)

    def logprobs(self, micro_batch: MicroBatch, *, gradients: bool) -> Tensor:
        tokens = self.to_device(micro_batch.tokens)
        with torch.set_grad_enabled(gradients):
            logits = self.model(input_ids=tokens, use_cache=False).logits
            targets = self.to_device(micro_batch.targets)
            chosen = logits.log_softmax(-1).gather(-1, targets).reshape(-1)
            if micro_batch.select is not None:
                chosen = chosen[self.to_device(micro_batch.select)]
        return chosen

    def sum_gradients(self) -> None:
        if self._ranks > 1:
            for parameter in self.model.parameters():
                if parameter.grad is None:  # of a rank without datums
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)

    def parameters(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def exports(self) -> Sequence[Export]:
        return [
            Export(name, tuple(each.shape), each.dtype, unit=name)
            for name, each in self.parameters().items()
        ]

    def export_weights(self, units: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.parameters().items():
            if name in units:
                yield name, parameter.detach()
