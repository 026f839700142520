"""No modules import each other, not even for types or inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("tandem", "gateway", "trainer_service", "sampler_service")
GENERATED = ("tandem/v1", "tandem/wire/v1")


def imported(path: Path) -> Iterator[str]:
    """Yield the names that a file imports, each also as a name of its module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_modules_import_each_other():
    modules: dict[str, Path] = {}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        relative = path.relative_to(ROOT).with_suffix("")
        if not relative.as_posix().startswith(GENERATED):
            modules[".".join(relative.parts).removesuffix(".__init__")] = path
    graph = {}
    for module, path in modules.items():
        names = [name if name in modules else name.rpartition(".")[0] for name in imported(path)]
        graph[module] = {name for name in names if name in modules} - {module}
    assert len(graph) > 100
    TopologicalSorter(graph).prepare()  # raises with the modules of a cycle
