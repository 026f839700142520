"""For tests that run on the CPU and, where there is one, on an NVIDIA GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
"""The values of a parameter `device`."""


def settings_on(device: str) -> dict[str, Any]:
    """Return what `trainer_process` needs to be told for a trainer on "cpu" or on "cuda"."""
    return {"device": "cuda", "devices": ["cuda:0"], "threads": 0} if device == "cuda" else {}
