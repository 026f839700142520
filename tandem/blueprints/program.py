"""`python -m tandem.blueprints.program`: trains one blueprint, for `running`.

It reads a `ProgramRequest` in JSON from standard input, and writes a `ProgramEnd` to an open file.
The gateway is that of TINKER_BASE_URL."""

from __future__ import annotations

import math
import os
import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from pydantic import BaseModel, Field, FiniteFloat

from tandem.blueprints.description import PROGRAM, Value
from tandem.blueprints.run import BlueprintRun
from tandem.errors import describe
from tandem.protocol.worker import die_with_parent

_SHORTEST_TTL = 3600
"""Seconds. The SDK allows no shorter time for a checkpoint."""


class ProgramRequest(BaseModel):
    """`deadline` is in seconds from the start of each run. `result` is a file descriptor, which
    gets the numbers as JSON. The file has no name, so that nothing is left of a killed command."""

    folder: Path
    model: str
    values: dict[str, Value]
    seed: int
    deadline: float
    result: int
    parent: int


class ProgramEnd(BaseModel):
    """The program's numbers, the ids of its runs and the path of its tuned weights. Or the error
    that ended it."""

    numbers: dict[str, FiniteFloat] = Field(default_factory=dict)
    runs: list[str] = []
    weights: str = ""
    error: str = ""


def main() -> int:
    request = ProgramRequest.model_validate_json(sys.stdin.buffer.read())
    die_with_parent(request.parent)
    try:
        end = _train(request)
    except Exception as error:  # noqa: BLE001 - another person's program
        traceback.print_exc()
        end = ProgramEnd(error=describe(error, typed=True))
    with os.fdopen(request.result, "w", encoding="utf-8") as result:
        result.write(end.model_dump_json())
    return 1 if end.error else 0


def _train(request: ProgramRequest) -> ProgramEnd:
    import tinker

    train = _load(request.folder / PROGRAM).train
    metadata = {
        "tandem.blueprint": request.folder.name,
        "tandem.deadline": f"{request.deadline:g}",
    }
    with tinker.ServiceClient(user_metadata=metadata) as service:
        run = BlueprintRun(
            service=service,
            model=request.model,
            values=request.values,
            seed=request.seed,
            tags=(f"blueprint:{request.folder.name}",),
            ttl_seconds=max(_SHORTEST_TTL, math.ceil(request.deadline)),
        )
        numbers = {str(name): float(value) for name, value in train(run).items()}
        weights = run.saved[-1] if run.saved else ""
        return ProgramEnd(numbers=numbers, runs=run.runs, weights=weights)


def _load(file: Path) -> ModuleType:
    sys.path.insert(0, str(file.parent))
    spec = spec_from_file_location("train", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["train"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
