"""A trainer backend that runs out of memory with a too large micro-batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tandem.protocol.worker import TrainingSpec
from tandem.settings.workers import TrainerSettings
from tests.support.other_packages import register
from trainer_service.backends import World
from trainer_service.backends.fsdp2 import Fsdp2Backend

Where = Literal["forward", "head", "backward", "block"]


class SmallMemory(Fsdp2Backend):
    """Runs out of memory with more than `most` tokens at once, or `checkpointed` tokens with
    checkpointed blocks.

    It fails in the middle of the forward pass, or of the backward pass when the head, a block or
    half a block has its gradients."""

    def __init__(
        self,
        *,
        model_path: Path,
        settings: TrainerSettings,
        world: World,
        training: TrainingSpec | None = None,
        most: int,
        checkpointed: int = 0,
        where: Where = "forward",
    ) -> None:
        super().__init__(model_path=model_path, settings=settings, world=world, training=training)
        self.most = most
        self.checkpointed = checkpointed
        self.failed = 0
        block: Any = self._model.model.layers[1]
        place: nn.Module = {
            "forward": block,
            "head": self._model.lm_head,
            "backward": block,
            "block": block.self_attn,
        }[where]
        place.register_forward_hook(partial(self._check, in_forward=where == "forward"))

    def _check(self, module: nn.Module, given: object, output: Any, *, in_forward: bool) -> None:
        found = output[0] if isinstance(output, tuple) else output
        most = self.most
        if self._checkpointing.on:
            most = max(most, self.checkpointed)
        if found.shape[:-1].numel() <= most:
            return
        if in_forward:
            self._fail()
        elif found.requires_grad:
            found.register_hook(lambda gradient: self._fail())

    def _fail(self) -> None:
        self.failed += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class SmallMemoryOnRank(SmallMemory):
    """Has memory for 20 tokens on one rank, or 40 if checkpointed, and enough on the others."""

    rank: int

    def __init__(
        self,
        *,
        model_path: Path,
        settings: TrainerSettings,
        world: World,
        training: TrainingSpec | None = None,
    ) -> None:
        super().__init__(
            model_path=model_path,
            settings=settings,
            world=world,
            training=training,
            most=20 if world.rank == self.rank else 10**9,
            checkpointed=40,
            where="block",
        )


class OnRank0(SmallMemoryOnRank):
    rank = 0


class OnRank1(SmallMemoryOnRank):
    rank = 1


def install(folder: Path) -> None:
    register(
        folder, "small-memory", **{f"small_memory_{n}": f"{__name__}:OnRank{n}" for n in (0, 1)}
    )
