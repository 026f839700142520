"""Writes docs/tinker-compatibility.md: for every method and command, what is asserted of it."""

from __future__ import annotations

from pathlib import Path

from tests.conformance.conform.claims import Claim
from tests.conformance.conform.surface import CLIENTS, COMMAND, NEWEST, OLDEST, Method

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


def render(*, methods: list[Method], commands: list[str], claims: list[Claim]) -> str:
    """The whole document; the same surface and claims give the same text."""
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
