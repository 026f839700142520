from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gateway.admin.doctor.cluster  # noqa: F401 - for its errors
import sampler_service.engine
import sampler_service.lifecycle
from scripts import error_table
from scripts.error_table import EXAMPLES, PAGE, descendants, error_page
from tandem.errors import TandemError, from_type

ROOT = Path(__file__).parents[3]
SOURCES = [
    path.read_text()
    for folder in ("gateway", "sampler_service", "tandem", "trainer_service")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
FEWEST_LETTERS = 12
"""A shorter text with gaps would match any message."""


def templates() -> Iterator[re.Pattern[str]]:
    """Yield the code's texts as patterns. A value matches anything."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [node.value]
            elif isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "" for part in node.values
                ]
            else:
                continue
            if sum(map(len, map(str, parts))) >= FEWEST_LETTERS:
                yield re.compile(
                    "".join(re.escape(str(part)) if part else ".*" for part in parts), re.DOTALL
                )


def test_the_page_is_as_the_code_has_it():
    assert error_page() == PAGE.read_text(), "run `python -m scripts.error_table`"


def test_the_code_produces_each_example():
    patterns = list(templates())
    invented = [
        text for text in EXAMPLES.values() if not any(each.fullmatch(text) for each in patterns)
    ]
    assert invented == []


def test_every_error_of_the_code_is_reported_by_a_type_of_the_page():
    known = {cls.__name__ for cls in descendants(TandemError)} | {"TandemError"}
    found = [
        (name, base)
        for source in SOURCES
        for name, base in re.findall(r"^class (\w+)\((\w+)[,)]", source, re.MULTILINE)
        if base in known
    ]
    assert {name for name, _ in found} <= known
    types = {cls.type for cls in EXAMPLES}
    assert {cls.type for cls in descendants(TandemError)} == types


def test_a_richer_error_is_told_between_processes_as_its_parent():
    for cls in (sampler_service.engine.WeightsTouched, sampler_service.lifecycle.NothingToServe):
        assert type(from_type(cls.type, "v1 is damaged")) is cls.__mro__[1]


def test_an_error_without_an_example_is_refused(monkeypatch):
    fewer = {cls: text for cls, text in EXAMPLES.items() if cls.type != "no_room"}
    monkeypatch.setattr(error_table, "EXAMPLES", fewer)
    with pytest.raises(ValueError, match="these errors have no example: NoRoom"):
        error_page()
