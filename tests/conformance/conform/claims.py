"""Claims: what a test asserts of which public methods or commands, declared on the test."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])

FOLDER = Path(__file__).parent.parent


@dataclass(frozen=True)
class Claim:
    subject: str
    """`TrainingClient.save_state`, or `tinker run list`."""
    that: str
    """What is asserted, as the end of the sentence that begins with the subject."""
    variant: str = ""
    """`sync` or `async` when the test runs its body once for each; else empty."""


def proves(*subjects: str, that: str) -> Callable[[F], F]:
    """Declares what a test asserts of each of these methods or commands."""
    return _declare([Claim(subject=subject, that=that) for subject in subjects])


def proves_both(*subjects: str, that: str) -> Callable[[F], F]:
    """As `proves`, of a method and of its `_async` twin: the test takes a `call` and runs twice."""
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
    """All modules of the suite, whether or not this session runs them."""
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
