"""The age of the weights behind sampled tokens, for in-flight samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Steps = NDArray[np.int64]


def staleness(runs: Sequence[Mapping[str, object]], *, step: int) -> Steps:
    """Return each sampled token's staleness [tokens]: the optimizer steps from its weights to
    `step`.

    `runs` comes from `GET /api/tandem/v1/samples/ID/versions`. Example: `[{"step": 3, "tokens": 2},
    {"step": 5, "tokens": 1}]` with step 6 gives [3, 3, 1]."""
    steps = np.array([run["step"] for run in runs], np.int64)
    counts = np.array([run["tokens"] for run in runs], np.int64)
    return step - np.repeat(steps, counts)
