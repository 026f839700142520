"""Every example in the product's docstrings runs and has its stated value.

After `Example:`, code in backticks with a call is Python."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from tandem.protocol.authority import Authority
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGES = ("tandem", "gateway", "trainer_service", "sampler_service")
ENGINE = "sampler_service.vllm.engine"


@dataclass(frozen=True)
class Example:
    """A docstring's pieces of code, and some of their values."""

    module: str
    line: int
    code: tuple[str, ...]
    values: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.module}:{self.line}"


def is_call(text: str) -> bool:
    try:
        return any(isinstance(node, ast.Call) for node in ast.walk(ast.parse(text)))
    except SyntaxError:
        return False


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Also docstrings of attributes, which are bare strings."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, " ".join(value.value.split())


def examples() -> list[Example]:
    found = []
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            for line, text in docstrings(ast.parse(file.read_text())):
                marked = re.search(r"\bExamples?:.*", text)
                spans = re.findall(r"`([^`]+)`", marked.group()) if marked else []
                code = tuple(span for span in spans if is_call(span))
                if code:
                    values = dict(re.findall(r"`([^`]+)` is `([^`]+)`", text))
                    found.append(Example(module, line, code, values))
    return found


EXAMPLES = examples()


def given(folder: Path) -> dict[str, Any]:
    """Names that examples neither define nor import."""
    Authority.create(folder / "authority")
    write_tiny_model(folder / "models/tiny")
    head = torch.nn.Linear(4, 7, bias=False)
    return {
        "Path": Path,
        "folder": folder / "authority",
        "registry": CollectorRegistry(),
        "CollectorRegistry": CollectorRegistry,
        "logits_of": head,
        "parameters": lambda: list(head.parameters()),
        "hidden": torch.zeros(3, 4),
        "targets": torch.zeros(3, 2, dtype=torch.long),
    }


async def run(code: str, namespace: dict[str, Any]) -> Any:
    """Run a piece, even with `await`. Return an expression's value."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        value = eval(compile(code, "example", "eval", flags=flags), namespace)
    except SyntaxError:
        value = eval(compile(code, "example", "exec", flags=flags), namespace)
    return await value if inspect.isawaitable(value) else value


def test_examples_are_found_in_every_package():
    assert len(EXAMPLES) >= 15
    assert {each.module.partition(".")[0] for each in EXAMPLES} == {*PACKAGES}
    assert ENGINE in [each.module for each in EXAMPLES]


@pytest.mark.parametrize(
    "example", [each for each in EXAMPLES if each.module != ENGINE], ids=lambda each: each.name
)
def test_an_example_runs_and_has_the_value_that_it_states(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = given(tmp_path) | vars(importlib.import_module(example.module))

    async def scenario() -> None:
        for code in example.code:
            value = await run(code, namespace)
            if (stated := example.values.get(code)) is not None:
                wanted = eval(stated, namespace)
                assert value == (pytest.approx(wanted) if isinstance(wanted, float) else wanted)

    asyncio.run(scenario())


@pytest.mark.nightly
def test_the_example_of_an_engine_runs_in_a_plain_script(tmp_path):
    """Nothing has prepared the environment for vLLM."""
    write_tiny_model(tmp_path / "models/tiny", head_dim=32)
    (example,) = [each for each in EXAMPLES if each.module == ENGINE]
    make, add, step = example.code
    (tmp_path / "script.py").write_text(f"""
from pathlib import Path
from sampler_service.engine import EngineRequest
from sampler_service.vllm.engine import VllmEngine
from tandem.settings.workers import SamplerSettings

{make}
request = EngineRequest(id="op-1", prompt=[5, 6], num_samples=2, max_tokens=4, temperature=1.0)
{add}
while not (results := {step}.results):
    pass
print([len(sample.tokens) for sample in results[0].samples])
""")
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.splitlines()[-1:] == ["[4, 4]"], done.stderr[-2000:]
