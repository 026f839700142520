from __future__ import annotations

from io import StringIO

import pytest
import typer.main
from typer.testing import CliRunner

from tandem.cli import context
from tandem.cli.main import app
from tandem.errors import UserError

COMMANDS = typer.main.get_command(app)


def commands(group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [path]
    for name, command in getattr(group, "commands", {}).items():
        found += commands(command, (*path, name))
    return found


def command_at(path: tuple[str, ...]):
    command = COMMANDS
    for name in path:
        command = command.commands[name]
    return command


@pytest.mark.parametrize("path", commands(COMMANDS), ids=" ".join)
@pytest.mark.parametrize("colour", [{}, {"FORCE_COLOR": "1", "TERM": "xterm-256color"}])
def test_no_help_has_a_picture_in_place_of_a_part_of_an_id(path, colour):
    done = CliRunner(env=colour).invoke(app, [*path, "--help"])
    assert done.exit_code == 0
    assert not [each for each in done.output if ord(each) > 0x2FFF]


def test_every_command_that_answers_can_answer_with_json():
    paths = [path for path in commands(COMMANDS) if not hasattr(command_at(path), "commands")]
    without = [
        path
        for path in paths
        if not any("--json" in parameter.opts for parameter in command_at(path).params)
    ]
    lasting = {("agent",), ("demo",), ("view",), ("playground", "runner")}
    assert set(without) == {*lasting, ("runs", "export")}


def test_the_help_of_every_command_has_an_example_that_begins_with_it():
    paths = [path for path in commands(COMMANDS) if not hasattr(command_at(path), "commands")]
    helps = {path: command_at(path).help or "" for path in paths}
    assert [p for p, text in helps.items() if f": tandem {' '.join(p)}" not in text] == []


def test_the_help_of_a_run_shows_an_id_as_it_is():
    assert "s-0123456789ab:train:0" in CliRunner().invoke(app, ["runs", "show", "--help"]).output


@pytest.mark.parametrize("text", ["s-1:train:0", "s-1:sample:3", ":bug:", "[bold]x[/]", "[/]"])
def test_what_commands_print_is_left_as_it_is(text, monkeypatch):
    for name in ("out", "err"):
        console = context.new_console()
        console.file = StringIO()
        monkeypatch.setattr(context, name, console)
    context.say(text)
    context.say_aside(text)
    context.fail(text)
    assert context.out.file.getvalue() == f"{text}\n"
    assert context.err.file.getvalue() == f"{text}\nerror: {text}\n"


@pytest.mark.parametrize(
    "command",
    [("runs", "show"), ("scale", "--replicas", "2"), ("checkpoints", "list", "--run")],
    ids=" ".join,
)
def test_a_path_in_place_of_an_id_is_refused_with_an_id_as_example(command):
    refused = CliRunner().invoke(app, [*command, "tinker://s-1:train:0/weights/a"]).exception
    assert isinstance(refused, UserError)
    assert "an id" in str(refused) and "such as s-0123456789ab:train:0" in str(refused)
