"""`make test-gpu`: what needs an NVIDIA GPU, and tests of the rest that say something new on one.

Exits with status 2 where there is none. Without `make`, in an environment that has the CUDA builds:
`python -m tests.gpu -k trainer --junitxml report.xml`, where all arguments are pytest's. Tests of
what is not installed are left out, and named at the end: those of trainers need neither vLLM nor
what the gateway needs.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tandem.agent.host import accelerators

ALSO = ("tests/component/trainer/test_devices.py",)
"""What real trainers say of the devices of the machine."""
WITH_ENGINES = (
    "tests/integration/test_agreement.py",
    "tests/integration/test_lora.py",
    "tests/integration/test_sessions.py",
)
"""Whole stacks, on whatever the machine has."""
_ROOT = Path(__file__).parents[2]


def why_not() -> str:
    """Return why this machine cannot run them, or nothing."""
    if not accelerators():
        return "there is no NVIDIA device here, which all of them need: nothing was tested"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} does not see the NVIDIA device that is here"
    return ""


class LeftOut:
    """A plugin of pytest: modules that import what is not installed are skipped, and named at the
    end with what they need. A module of our own that is missing stays an error."""

    def __init__(self) -> None:
        self.modules: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        call = getattr(report, "call", None)  # there while it has not been told to debuggers
        error = call.excinfo.value.__cause__ if call is not None and call.excinfo else None
        if isinstance(error, ModuleNotFoundError) and error.name and not _is_ours(error.name):
            self.modules[collector.nodeid] = error.name
            report.outcome = "skipped"
            report.longrepr = (collector.nodeid, 0, f"needs {error.name}, which is not installed")
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for module, package in self.modules.items():
            terminalreporter.write_line(f"left out: {module}: {package} is not installed")
        if find_spec("vllm") is None:
            for path in WITH_ENGINES:
                terminalreporter.write_line(f"left out: {path}: vllm is not installed")


def _is_ours(module: str) -> bool:
    return (_ROOT / module.partition(".")[0]).is_dir()


def main(arguments: Sequence[str]) -> int:
    if reason := why_not():
        print(f"test-gpu: {reason}", file=sys.stderr)
        return 2
    paths = ["tests/gpu", *ALSO]
    if find_spec("vllm") is not None:
        paths += WITH_ENGINES
    # One process: an engine measures the GPU's memory while it starts.
    return pytest.main(["-n0", *paths, *arguments], plugins=[LeftOut()])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
