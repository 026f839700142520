"""Where measurements are written down."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

_RESULTS = Path(__file__).parent / "results"


def save(results: Mapping[str, object]) -> Path:
    """A file of its own in `results/`, under the date and a number."""
    _RESULTS.mkdir(exist_ok=True)
    path = _RESULTS / f"{time.strftime('%Y-%m-%d')}-{len(list(_RESULTS.iterdir())):03d}.json"
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return path
