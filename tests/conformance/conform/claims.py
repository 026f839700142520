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

Written by the conformance suite (`make conformance`); do not edit. Every public method of the
SDK's clients and every command of its command line is listed with what the suite asserts of it,
against a real gateway with real trainers and samplers. A method without an assertion fails the
suite.

The whole suite runs on tinker {NEWEST}; its core also runs on {OLDEST}, the oldest release we
support (`scripts/conformance.sh {OLDEST}`). An older client whose protocol we do not speak is
told once, with a 400, which version to install.
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
        own = sorted((m for m in methods if m.owner == client), key=lambda method: method.name)
        lines += [f"\n## {client}: {len(own)} methods\n", "| method | asserted |", "|---|---|"]
        lines += [_row(m.path, m.name + ("¹" if m.deprecated else ""), claims) for m in own]
    lines += [f"\n## Command line: {len(commands)} commands\n", "| command | asserted |"]
    lines += ["|---|---|"]
    lines += [_row(c, c.removeprefix(f"{COMMAND} "), claims) for c in sorted(commands)]
    lines += ["\n¹ deprecated by the SDK, and served all the same\n"]
    return "\n".join(lines)


def _row(subject: str, shown: str, claims: list[Claim]) -> str:
    said = sorted({claim.that for claim in claims if claim.subject == subject})
    return f"| `{shown.rstrip('¹')}`{'¹' if shown.endswith('¹') else ''} | {'; '.join(said)} |"
