from __future__ import annotations

import orjson
from typer.testing import CliRunner

from tandem.cli import checkpoints
from tandem.cli.main import app

PATH = "tinker://s-0123456789ab:train:0/weights/final"


def test_the_question_before_a_deletion_is_not_part_of_its_json(monkeypatch):
    monkeypatch.setattr(checkpoints, "call", lambda *_, **__: None)
    done = CliRunner().invoke(app, ["checkpoints", "delete", PATH, "--json"], input="y\n")
    answer = done.stdout.partition("y\n")[2]  # the runner echoes the input, as a terminal does
    assert orjson.loads(answer) == {"deleted": [PATH]}
    assert done.stderr.startswith(f"Delete {PATH}?")
