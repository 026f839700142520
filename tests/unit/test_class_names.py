"""Unique class names let a search find one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("tandem", "gateway", "trainer_service", "sampler_service")
GENERATED = ("tandem/v1", "tandem/wire/v1")


def test_no_class_name_exists_twice():
    found = defaultdict(list)
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        relative = path.relative_to(ROOT).as_posix()
        if relative.startswith(GENERATED):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(relative)
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
