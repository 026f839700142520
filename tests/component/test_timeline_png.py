"""The timeline as an image. Not beside its other tests: the first time on a machine, matplotlib
starts a process to look for fonts."""

from __future__ import annotations

import pytest

from tandem.cli.timeline import Span, draw, write_png


def test_a_png_is_drawn_where_matplotlib_is_installed(tmp_path):
    pytest.importorskip("matplotlib")
    span = Span(
        group="gpu", worker="s-1:train:0", kind="trainer", owner="ann", session_id="s-1",
        began=0.0, ended=50.0, wake_seconds=1.0, sleep_seconds=1.0,
    )  # fmt: skip
    write_png(draw([span], began=0.0, ended=100.0), tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
