"""The picture of who had the devices; `tandem groups`, `top` and `timeline` on given answers."""

from __future__ import annotations

import re
from io import StringIO
from xml.etree import ElementTree

import orjson
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem.cli import groups, timeline
from tandem.cli.main import app
from tandem.cli.timeline import Span, draw, to_svg
from tandem.errors import UserError

BEGAN = 1_795_000_000.0
SVG = "{http://www.w3.org/2000/svg}"


def span(began: float, ended: float, **changes) -> Span:
    values = {
        "group": "gpu",
        "worker": "s-1:train:0",
        "kind": "trainer",
        "owner": "ann",
        "session_id": "s-1",
        "wake_seconds": 1.0,
        "sleep_seconds": 2.0,
    }
    return Span(**(values | changes), began=BEGAN + began, ended=BEGAN + ended)


def another_owners(began: float, ended: float) -> Span:
    return span(began, ended, worker="", kind="", owner="", session_id="")


def drawn(*spans: Span, seconds: float = 100):
    return draw(spans, began=BEGAN, ended=BEGAN + seconds)


def boxes_of(picture, shade: str = "plain"):
    """Without those of the legend."""
    return [box for box in picture.boxes if box.height > 12 and box.shade == shade]


def test_a_box_is_as_long_as_its_worker_had_the_devices_with_its_wake_and_its_sleep():
    picture = drawn(span(0, 50), span(50, 100))
    lane, first, second = boxes_of(picture)
    assert first.x == lane.x
    assert first.width == pytest.approx(lane.width / 2)
    assert second.x == pytest.approx(lane.x + lane.width / 2)
    waking, falling = boxes_of(picture, "waking")[0], boxes_of(picture, "falling asleep")[0]
    assert (waking.x, waking.width) == (first.x, pytest.approx(lane.width / 100))
    assert falling.width == pytest.approx(lane.width / 50)
    assert falling.x + falling.width == pytest.approx(first.x + first.width)


def test_each_group_has_a_lane_and_a_row_for_each_worker_that_was_awake_at_once():
    spans = [span(0, 50), span(10, 60, worker="other"), span(60, 90), span(5, 6, group="sample")]
    lanes = [box for box in boxes_of(drawn(*spans)) if not box.hint]
    assert len(lanes) == 3
    assert len({box.y for box in lanes}) == 3


def test_a_session_has_one_colour_on_all_groups_and_other_owners_have_none():
    spans = [
        span(0, 9),
        span(10, 19, session_id="s-2"),
        span(0, 9, group="b"),
        another_owners(2, 3),
    ]
    picture = drawn(*spans)
    colours = [box.colour for box in boxes_of(picture) if box.hint]
    assert len(colours) == 4
    assert len(set(colours)) == 3
    legend = [label.text for label in picture.labels]
    assert "ann  s-1  18.0 s" in legend
    assert "other owners  1.0 s" in legend


def test_what_began_before_the_picture_and_what_lasts_are_cut_at_its_edges():
    lane, box = boxes_of(drawn(span(-50, 150)))
    assert (box.x, box.width) == (lane.x, pytest.approx(lane.width))


@pytest.mark.parametrize("seconds", [0.5, 7, 60, 600, 3600, 86_400, 900_000])
def test_the_axis_has_a_few_marks_at_whole_times(seconds):
    picture = drawn(span(0, seconds), seconds=seconds)
    assert 1 <= len(picture.rules) <= 10


def test_the_picture_is_valid_svg_whatever_sessions_are_called():
    picture = drawn(span(0, 50, owner="<ann> & 'co'", worker="<&>"))
    root = ElementTree.fromstring(to_svg(picture))
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert "<ann> & 'co'  s-1  50.0 s" in texts
    assert any("<&>" in each.text for each in root.iter(f"{SVG}title"))


# --- The commands -----------------------------------------------------------------------------

WORKER = {
    "state": "waiting",
    "position": 2,
    "worker": "s-0123456789ab:train:0",
    "kind": "trainer",
    "owner": "ann",
    "session_id": "s-0123456789ab",
    "seconds": 12.3,
    "expected_seconds": 45.6,
    "reason": "the devices of group gpu are used by others",
    "device_seconds": 78.9,
    "device_bytes": 0,
    "host_bytes": 3 * 2**30,
    "disk_bytes": 5 * 2**30,
}
ANOTHERS = {key: type(value)() for key, value in WORKER.items()} | {"state": "awake"}
GROUP = {
    "name": "gpu",
    "host": "host",
    "devices": ["cuda:GPU-0123"],
    "roles": ["sampler", "trainer"],
    "awake": 1,
    "workers": [ANOTHERS, WORKER],
    "most_workers": 16,
    "placed": 2,
    "drained": False,
    "policy": "deferred",
    "switches": 57,
    "switch_seconds": 0.321,
    "resident_bytes": 0,
    "sleeping_bytes": 3 * 2**30,
    "spilled_bytes": 5 * 2**30,
}
QUEUED = {
    "position": 1,
    "worker": "s-9:train:0",
    "owner": "ben",
    "session_id": "s-9",
    "reason": "16 workers are there",
}
SPANS = {
    "since": BEGAN,
    "until": BEGAN + 60,
    "truncated": False,
    "owners": [{"owner": "ann", "device_seconds": 40.0}],
    "spans": [{**vars(span(10, 20))}, {**vars(span(30, 0)), "ended": None}],
}


@pytest.fixture
def asked(monkeypatch):
    """What was asked of the gateway; it answers with the above."""
    found = []

    def call(_data_dir, method, path):
        found.append((method, path))
        if path == "groups":
            memory = {"budget_bytes": 8 * 2**30, "used_bytes": 3 * 2**30}
            return {"groups": [GROUP], "memory": memory, "queue": [QUEUED]}
        return GROUP if "drain" in path else SPANS

    monkeypatch.setattr(groups, "call", call)
    monkeypatch.setattr(timeline, "call", call)
    return found


def tandem(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_groups_are_listed_with_what_is_on_them(asked):
    head, row, memory = tandem("groups", "list").splitlines()
    assert head.split()[:5] == ["group", "state", "awake", "waiting", "placed"]
    assert row.split()[:7] == ["gpu", "open", "1/1", "1", "2/16", "57", "0.32"]
    assert "3.0 GiB" in row and "5.0 GiB" in row
    assert memory == "host memory: workers that take turns have 3.0 GiB of 8.0 GiB"
    assert orjson.loads(tandem("groups", "list", "--json"))["groups"] == [GROUP]


def test_a_group_is_drained_and_that_is_undone(asked):
    assert "takes no more workers; 2 are there" in tandem("groups", "drain", "gpu")
    assert "takes workers again" in tandem("groups", "drain", "gpu", "--undo")
    assert asked == [("POST", "groups/gpu/drain"), ("DELETE", "groups/gpu/drain")]


def test_top_shows_holders_waiters_with_their_turn_and_the_owners_seconds(asked):
    said = tandem("top", "--once")
    lines = said.splitlines()
    waiting = next(line for line in lines if "s-0123456789ab:train:0" in line)
    assert waiting.split()[:7] == ["gpu", "waiting", "2", "12.3", "s", "45.6", "s"]
    assert any("awake" in line and "(another owner's)" in line for line in lines)
    assert "waiting for a place:" in lines
    assert any(re.fullmatch(r"ann +40\.0 *", line) for line in lines)
    as_json = orjson.loads(tandem("top", "--json"))
    assert as_json.keys() == {"groups", "memory", "queue", "owners"}


def interrupt_after(looks: int, monkeypatch) -> None:
    slept = []

    def sleep(_seconds: float) -> None:
        slept.append(_seconds)
        if len(slept) == looks:
            raise KeyboardInterrupt

    monkeypatch.setattr("tandem.cli.groups.time.sleep", sleep)


def test_top_prints_again_and_again_in_a_pipe_until_it_is_interrupted(asked, monkeypatch):
    interrupt_after(3, monkeypatch)
    assert tandem("top", "--interval", "0.5").count("device seconds") == 3


def test_top_draws_over_itself_on_a_terminal(asked, monkeypatch):
    shown = StringIO()
    console = Console(file=shown, force_terminal=True, width=80, height=40)
    for module in ("groups", "tables", "context"):
        monkeypatch.setattr(f"tandem.cli.{module}.out", console)
    interrupt_after(2, monkeypatch)
    tandem("top")
    assert shown.getvalue().count("s-0123456789ab:train:0") == 2
    assert "\x1b[?1049l" in shown.getvalue(), "it gives the terminal back"


def test_the_timeline_is_written_from_its_first_span_on(asked, tmp_path):
    out = tmp_path / "timeline.svg"
    said = tandem("timeline", "--since", "2m", "--group", "gpu", "--out", str(out))
    assert said.strip().endswith("timeline.svg: 2 spans of 50 s")
    assert ElementTree.parse(out).getroot().tag == f"{SVG}svg"
    ((method, path),) = asked
    assert (method, path.partition("?")[0]) == ("GET", "leases/spans")
    assert "group=gpu" in path


def test_a_timeline_of_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(timeline, "call", lambda *_: {**SPANS, "spans": []})
    with pytest.raises(
        UserError, match=r"nobody had leased devices in the last 10m.*`tandem top` shows"
    ):
        tandem("timeline")
