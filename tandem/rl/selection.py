"""Selection of samples, and penalties for long ones (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]


def soft_overlong(lengths: NDArray[np.int64], *, longest: int, buffer: int) -> Floats:
    """Return the penalty, 0 to -1, for answers of these lengths in tokens.

    It is 0 up to `longest - buffer`, then linear down to -1 at `longest`. Example: with longest
    20480 and buffer 4096, a length of 18432 gives -0.5."""
    slope = (longest - buffer - lengths) / buffer
    result: Floats = np.clip(slope, -1.0, 0.0)
    return np.where(lengths > longest, -1.0, result)


def overlong_mask(truncated: Booleans, mask: Floats) -> Floats:
    """Return `mask` [sequences, tokens] with 0 for truncated sequences [sequences].

    Nothing is learned from a truncated answer, because its end is unknown."""
    kept: Floats = mask * ~truncated[:, None]
    return kept


def dynamic_sampling(correct: Booleans) -> Booleans:
    """Return the groups to keep [groups], for right answers [groups, samples].

    A group that is all right or all wrong has no advantages. Keep 0 < #right < samples, and sample
    other prompts for the rest."""
    right = correct.sum(axis=1)
    kept: Booleans = (right > 0) & (right < correct.shape[1])
    return kept
