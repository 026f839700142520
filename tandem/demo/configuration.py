"""The configuration of the demo, with defaults that work."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from tandem import __version__
from tandem.stack import Endpoint

if TYPE_CHECKING:
    from tinker import types


class _Updates(BaseModel):
    model_config = ConfigDict(frozen=True)

    betas: tuple[float, float]
    clip_norm: float = 1.0

    def adam(self, learning_rate: float) -> types.AdamParams:
        from tinker import types

        beta1, beta2 = self.betas
        return types.AdamParams(
            learning_rate=learning_rate, beta1=beta1, beta2=beta2, grad_clip_norm=self.clip_norm
        )


class WarmUp(_Updates):
    """Supervised training on imperfect examples, with cross_entropy."""

    steps: int = 800
    batch: int = 64
    learning_rate: float = 1e-3
    final_learning_rate: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)


class Reinforcement(_Updates):
    """Reinforcement learning. `learning_rate` is halved in the first step and decays to a tenth."""

    steps: int = 10
    samples: int = 8
    minibatches: int = 8
    epochs: int = 6
    algorithm: Literal["reward", "grpo"] = "reward"
    loss: str = "importance_sampling"
    learning_rate: float = 5e-4
    final_learning_rate: float = 0.1
    first_step: float = 0.5
    betas: tuple[float, float] = (0.9, 0.99)
    temperature: float = 1.0


class DemoConfiguration(BaseModel):
    """The configuration, stored as `config.json` in the run directory.

    `endpoint` is a running gateway with the base model and its own `ranks` (None here). Without it,
    the demo starts one. `save` is the name for the trained weights, if they are to be kept."""

    model_config = ConfigDict(frozen=True)

    out: Path
    data_dir: Path
    endpoint: Endpoint | None = Field(None, exclude=True)
    seed: int = 0
    ranks: int | None = None
    save: str = ""
    warm_up: WarmUp = WarmUp()
    reinforcement: Reinforcement = Reinforcement()

    @property
    def model_name(self) -> str:
        return f"tandem/tiny-addition-{self.seed}"

    @property
    def model_path(self) -> Path:
        return self.data_dir / "models" / f"tiny-addition-{self.seed}"

    @property
    def warm_up_name(self) -> str:
        """A hash of everything that the checkpoint depends on."""
        decisive = f"{__version__} {self.seed} {self.warm_up.model_dump_json()}"
        return f"warm-up-{hashlib.sha256(decisive.encode()).hexdigest()[:12]}"
