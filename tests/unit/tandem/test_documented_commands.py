"""Every `tandem` command of README.md and docs/ exists, with its options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from tandem.cli.main import app

ROOT = Path(__file__).parents[3]
COMMANDS = typer.main.get_command(app)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHELLS = ("", "bash", "console", "sh")
INLINE = re.compile(r"`((?:\.venv/bin/)?tandem [^`]+)`")
ENDS = {"|", "||", "&&", ";", ">", ">>", "2>&1", "&"}
BEFORE = {"$", "--", "gateway", "exec"}
"""Words besides `ENDS` that precede a command, as in `docker compose exec gateway tandem`."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_documented_command_exists(page):
    faults = [
        f"{line}: {why}"
        for line in command_lines(page.read_text())
        for words in invocations(line)
        if (why := fault(words))
    ]
    assert not faults, "\n".join(faults)


def test_commands_are_found_in_blocks_and_in_text():
    block = (
        "```\n.venv/bin/tandem status  # now\ndocker compose exec gateway tandem top | less\n```\n"
    )
    lines = command_lines(f"{block}Or `tandem groups\nlist`.\n```python\ntandem up\n```\n")
    assert [words for line in lines for words in invocations(line)] == [
        ["status"],
        ["top"],
        ["groups", "list"],
    ]
    found = [
        w for page in PAGES for line in command_lines(page.read_text()) for w in invocations(line)
    ]
    assert len(found) >= 100


def test_an_unknown_command_or_option_is_noticed():
    assert fault(["checkpoints", "exports"]) == "there is no command exports"
    assert fault(["up", "--modle", "a=b"]) == "there is no option --modle"
    assert fault(["up", "again"]) == "too many arguments: again"
    assert fault(["checkpoints", "export", "PATH", "DIRECTORY", "--merged"]) is None


def command_lines(text: str) -> list[str]:
    """Return the lines of shell blocks, and inline code that begins with `tandem`."""
    shells = "".join(block for language, block in BLOCK.findall(text) if language in SHELLS)
    lines = shells.replace("\\\n", " ").splitlines()
    return lines + [" ".join(each.split()) for each in INLINE.findall(BLOCK.sub("", text))]


def invocations(line: str) -> list[list[str]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a line of a longer quotation
        return []
    found = []
    for at, word in enumerate(words):
        before = words[at - 1] if at else "$"
        begins = before in ENDS | BEFORE or "=" in before
        if begins and (word == "tandem" or word.endswith("bin/tandem")):
            rest = words[at + 1 :]
            end = next((i for i, each in enumerate(rest) if each in ENDS), len(rest))
            found.append(rest[:end])
    return found


def fault(words: list[str]) -> str | None:
    """Return the command line's refusal of these words, or `None`."""
    command, taken = COMMANDS, []
    options: dict[str, bool] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        options = {
            name: getattr(each, "is_flag", False)
            for each in command.params
            for name in (*each.opts, *each.secondary_opts)
        } | {"--help": True}
        if word.startswith("-"):
            name, equals, _ = word.partition("=")
            if name not in options:
                return f"there is no option {name}"
            if not options[name] and not equals and rest:
                rest.pop(0)
        elif hasattr(command, "commands"):
            if word not in command.commands:
                return f"there is no command {word}"
            command = command.commands[word]
        else:
            taken.append(word)
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    if any(each.nargs < 0 for each in arguments):
        return None
    return f"too many arguments: {taken[-1]}" if len(taken) > len(arguments) else None
