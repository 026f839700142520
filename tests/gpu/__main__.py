"""`make test-gpu`: tests that need an NVIDIA GPU, or prove more on one.

Exits with status 2 without a GPU. Without `make`, in an environment with CUDA builds:
`python -m tests.gpu -k trainer --junitxml report.xml`, with any arguments of pytest. Tests with
missing packages are skipped, and named at the end. Trainer tests need neither vLLM nor the
gateway's packages."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tandem.agent.host import accelerators

ALSO = ("tests/component/trainer/test_devices.py",)
WITH_ENGINES = (
    "tests/integration/test_agreement.py",
    "tests/integration/test_lora.py",
    "tests/integration/test_sessions.py",
)
_ROOT = Path(__file__).parents[2]


def why_not() -> str:
    """Return why this machine cannot run the tests, or an empty string."""
    if not accelerators():
        return "there is no NVIDIA device here, which all of them need: nothing was tested"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} does not see the NVIDIA device that is here"
    return ""


class LeftOut:
    """A pytest plugin: skips modules with missing packages, and names both at the end. A missing
    module of our own stays an error."""

    def __init__(self) -> None:
        self.modules: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        call = getattr(report, "call", None)  # pytest deletes it after it tells debuggers
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
    # In one process: an engine measures GPU memory during its start.
    return pytest.main(["-n0", *paths, *arguments], plugins=[LeftOut()])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
