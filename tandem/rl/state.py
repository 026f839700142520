"""What a killed loop needs to continue: a small file beside the trainer's saved state."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

_FILE = "state.json"


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """The loop after `step` steps, when the trainer saved `path` after `policy_step` optimizer
    steps.

    Numbers of examples below `cursor` have served, except those in `under_way`, which has pairs of
    a number and its attempt. The order of the examples depends on `seed` and `examples`, the length
    of the dataset. `dropped` counts groups and rollouts by reason."""

    step: int = 0
    policy_step: int = 0
    cursor: int = 0
    under_way: tuple[tuple[int, int], ...] = ()
    path: str | None = None
    seed: int
    examples: int
    dropped: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of_folder(cls, folder: Path | None, *, seed: int, examples: int) -> Self:
        """Return the saved state, or that of a new loop.

        Raises `ValueError` if the saved loop had another seed or dataset."""
        if folder is None or not (file := folder / _FILE).exists():
            return cls(seed=seed, examples=examples)
        found = json.loads(file.read_text())
        pairs = tuple((int(number), int(attempt)) for number, attempt in found.pop("under_way"))
        state = cls(under_way=pairs, **found)
        for name, value in (("seed", seed), ("examples", examples)):
            if getattr(state, name) != value:
                raise ValueError(
                    f"{file} is of a loop with {name} {getattr(state, name)}, and this one has "
                    f"{value}: choose another folder as `out`, or the same {name}"
                )
        return state

    def write_to(self, folder: Path) -> None:
        """Replace the folder's state, at once or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{_FILE}.partial"
        with partial.open("w") as file:
            json.dump(asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / _FILE)
