"""The configuration of the demo, with defaults that work."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from tandem import __version__
from tandem.stack import Endpoint


class DemoConfiguration(BaseModel):
    """The configuration, stored in `config.json` in the run directory. `addition` has the settings
    of the loops.

    `endpoint` is a running gateway with the base model and its own `ranks` (None here). Without it,
    the demo starts one. `save` is the name for the trained weights, if they are to be kept."""

    model_config = ConfigDict(frozen=True)

    out: Path
    data_dir: Path
    endpoint: Endpoint | None = Field(None, exclude=True)
    seed: int = 0
    ranks: int | None = None
    save: str = ""

    @property
    def model_name(self) -> str:
        return f"tandem/tiny-addition-{self.seed}"

    @property
    def model_path(self) -> Path:
        return self.data_dir / "models" / f"tiny-addition-{self.seed}"

    @property
    def warm_up_name(self) -> str:
        """A hash of everything that the checkpoint depends on."""
        from tandem.demo.addition import WARM_UP, WARM_UP_STEPS

        decisive = f"{__version__} {self.seed} {WARM_UP_STEPS} {WARM_UP}"
        return f"warm-up-{hashlib.sha256(decisive.encode()).hexdigest()[:12]}"
