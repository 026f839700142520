"""Flips the sign of each gradient before the steps of torch's optimizers.

`flipped.py PROGRAM ARGUMENTS…` does so in another program. It also runs in TRL's environment, so it
imports nothing else of Tandem."""

from __future__ import annotations

import runpy
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


def flip(optimizer: torch.optim.Optimizer, *_about: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.neg_()


if __name__ == "__main__":
    register_optimizer_step_pre_hook(flip)
    runpy.run_path(sys.argv[1], run_name="__main__")
