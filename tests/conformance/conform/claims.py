"""Claims: a test declares the methods or commands that it proves something about.

`render` writes docs/tinker-compatibility.md."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TypeVar

from tests.conformance.conform.surface import CLIENTS, COMMAND, NEWEST, OLDEST, Method

F = TypeVar("F", bound=Callable[..., object])

FOLDER = Path(__file__).parent.parent
PATH = Path(__file__).parents[3] / "docs" / "tinker-compatibility.md"

_HEAD = f"""\
# Compatibility with the tinker SDK

A whole passing run of `make conformance` writes this page. It has every public method of the SDK's
clients and every command of `tinker`, with the assertions of the suite against a real gateway,
trainers and samplers. The whole suite runs on tinker {NEWEST}, and its core also on the oldest
tested release, {OLDEST}. An older client gets a 400 that names the version to install.

- ¹ deprecated by the SDK, but supported
- ² also with `_async` at its end, which the SDK deprecates
"""


@dataclass(frozen=True)
class Claim:
    subject: str
    """`TrainingClient.save_state`, or `tinker run list`."""
    that: str
    """The rest of the sentence that begins with the subject."""
    variant: str = ""
    """`sync` or `async` if the test runs for both, otherwise empty."""


def proves(*subjects: str, that: str) -> Callable[[F], F]:
    """Declares a claim about each of these methods or commands."""
    return _declare([Claim(subject=subject, that=that) for subject in subjects])


def proves_both(*subjects: str, that: str) -> Callable[[F], F]:
    """Like `proves`, also for `_async` twins. The test takes a `call` and runs twice."""
    return _declare(
        [Claim(subject=subject, that=that, variant="sync") for subject in subjects]
        + [Claim(subject=f"{subject}_async", that=that, variant="async") for subject in subjects]
    )


def _declare(claims: list[Claim]) -> Callable[[F], F]:
    def decorate(test: F) -> F:
        test.__dict__["claims"] = [*claims, *claims_of(test)]
        return test

    return decorate


def claims_of(test: object) -> list[Claim]:
    return getattr(test, "claims", [])


def test_modules() -> Iterator[ModuleType]:
    """All modules of the suite, even if this session leaves them out."""
    for file in sorted(FOLDER.glob("test_*.py")):
        yield importlib.import_module(f"tests.{FOLDER.name}.{file.stem}")


def all_claims() -> list[Claim]:
    return [
        claim
        for module in test_modules()
        for test in vars(module).values()
        if isinstance(test, FunctionType) and test.__module__ == module.__name__
        for claim in claims_of(test)
    ]


def render(*, methods: list[Method], commands: list[str], claims: list[Claim]) -> str:
    lines = [_HEAD]
    for client in CLIENTS:
        own = {m.name: m for m in sorted(methods, key=lambda m: m.name) if m.owner == client}
        lines += [f"\n## {client}: {len(own)} methods\n", "| method | asserted |", "|---|---|"]
        subjects: dict[str, set[str]] = {}
        for name, method in own.items():
            if name.removesuffix("_async") in own.keys() - {name}:
                continue  # beside its twin
            shown, paths = _named(name, method), {method.path}
            if twin := own.get(f"{name}_async"):
                shown += "²" if twin.deprecated else ", `_async`"
                paths.add(twin.path)
            subjects[shown] = paths
        lines += _rows(subjects, claims)
    lines += [f"\n## Command line: {len(commands)} commands\n", "| command | asserted |"]
    lines += ["|---|---|"]
    lines += _rows({f"`{c.removeprefix(f'{COMMAND} ')}`": {c} for c in sorted(commands)}, claims)
    return "\n".join([*lines, ""])


def _named(name: str, method: Method) -> str:
    return f"`{name}`" + ("¹" if method.deprecated else "")


def _rows(subjects: dict[str, set[str]], claims: list[Claim]) -> list[str]:
    """Names with the same claims share a row."""
    rows: dict[str, list[str]] = {}
    for name, own in subjects.items():
        said = sorted({claim.that for claim in claims if claim.subject in own})
        rows.setdefault("; ".join(said), []).append(name)
    return [f"| {', '.join(names)} | {said} |" for said, names in rows.items()]
