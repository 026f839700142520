"""`make test-gpu`: what needs an NVIDIA GPU, and tests of the rest that say something new on one.

Exits with status 2 where there is none. Without `make`, in an environment that has the CUDA builds:
`python -m tests.gpu -k trainer`.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from tandem.host import accelerators

ALSO = (
    "tests/unit/trainer/test_devices.py",
    "tests/unit/trainer/test_offload.py",
    "tests/unit/trainer/test_switching.py",
    "tests/unit/gateway/test_groups.py",
)
WITH_ENGINES = (
    "tests/unit/sampler/test_sleep.py",
    "tests/integration/test_agreement.py",
    "tests/integration/test_lora.py",
    "tests/integration/test_sessions.py",
)
"""Whole stacks, on whatever the machine has."""


def why_not() -> str:
    """Return why this machine cannot run them, or nothing."""
    if not accelerators():
        return "there is no NVIDIA device here, which all of them need: nothing was tested"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} does not see the NVIDIA device that is here"
    return ""


def main() -> int:
    if reason := why_not():
        print(f"test-gpu: {reason}", file=sys.stderr)
        return 2
    paths = ["tests/gpu", *ALSO]
    if find_spec("vllm") is None:
        print("test-gpu: vLLM is not installed, so that engines are not tested", file=sys.stderr)
    else:
        paths += WITH_ENGINES
    # One process: an engine measures the GPU's memory while it starts.
    return pytest.main(["-n0", *paths, *sys.argv[1:]])


if __name__ == "__main__":
    raise SystemExit(main())
