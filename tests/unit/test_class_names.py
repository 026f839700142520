"""A search should find one thing: class names are unique, and few classes share a method name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("tandem", "gateway", "trainer_service", "sampler_service")
GENERATED = ("tandem/v1", "tandem/wire/v1", "gateway/storage/migrations")
MOST_CLASSES = 8
# contextlib.closing calls `close`, torch calls the others.
PRESCRIBED = {"close", "forward", "backward"}


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield each class of the product with its file."""
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        relative = path.relative_to(ROOT).as_posix()
        if relative.startswith(GENERATED):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield relative, node


def bases_of(node: ast.ClassDef) -> list[str]:
    """Return the names of the bases, without modules and parameters."""
    return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]


def methods_of(node: ast.ClassDef) -> set[str]:
    functions = (
        each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {each.name for each in functions if not each.name.startswith("_")}


def members_of(node: ast.ClassDef) -> set[str]:
    """Return the methods and the attributes, including those of `self` that a method sets."""
    fields = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    of_self = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    return methods_of(node) | fields | of_self


def test_no_class_name_exists_twice():
    found = defaultdict(list)
    for file, node in classes():
        found[node.name].append(file)
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_few_classes_share_a_method_name():
    """A method that a base or a wholly implemented Protocol declares does not count."""
    found = [*classes()]
    by_name = {node.name: node for _file, node in found}
    interfaces = {
        node.name: (methods_of(node), members_of(node))
        for _file, node in found
        if {"Protocol", "ABC"} & {*bases_of(node)}
    }

    def inherited(node: ast.ClassDef) -> set[str]:
        bases = [by_name[base] for base in bases_of(node) if base in by_name and base != node.name]
        return {name for base in bases for name in methods_of(base) | inherited(base)}

    sharing = defaultdict(list)
    for file, node in found:
        if node.name in interfaces:
            continue
        mine = members_of(node)
        declared = (methods for methods, members in interfaces.values() if members <= mine)
        for name in methods_of(node).difference(PRESCRIBED, inherited(node), *declared):
            sharing[name].append(f"{node.name} in {file}")
    complaints = [
        f"more than {MOST_CLASSES} classes have a method {name!r}: {', '.join(users)}. "
        "Give it a longer name where it has few callers."
        for name, users in sorted(sharing.items())
        if len(users) > MOST_CLASSES
    ]
    assert not complaints, "\n".join(complaints)
