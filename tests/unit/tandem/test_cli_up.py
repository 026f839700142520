from __future__ import annotations

from contextlib import contextmanager

from typer.testing import CliRunner

from tandem.cli import up
from tandem.cli.main import app


def interrupted(*_given: object, **_named: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_while_the_address_is_told_stops_the_stack_in_order(monkeypatch, tmp_path):
    ended = []

    @contextmanager
    def stack(**_settings: object):
        yield None
        ended.append("in order")

    monkeypatch.setattr(up, "Stack", stack)
    monkeypatch.setattr(up, "_announce", interrupted)
    monkeypatch.setattr(up.signal, "signal", lambda number, handler: None)
    done = CliRunner().invoke(app, ["up", "--data-dir", str(tmp_path)])
    assert (done.exit_code, ended) == (0, ["in order"])
