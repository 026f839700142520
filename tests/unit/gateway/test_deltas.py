from __future__ import annotations

from collections.abc import Iterable

import pytest

from gateway.runs.deltas import DeltaBase, Published
from gateway.runs.run import Run
from gateway.workers.run_options import RunOptions
from tandem.protocol.worker import TrainingSpec
from tandem.v1 import trainer_pb2

WHOLE = 1000


def published(base: DeltaBase, sizes: Iterable[int]) -> str:
    """Publish versions with deltas of these sizes. Return a letter for each: W(hole) or D(elta)."""
    written = ""
    for number, size in enumerate(sizes):
        of = base.next()
        base.note_published(Published(f"v{number}", WHOLE, size if of else WHOLE, delta_of=of))
        written += "D" if of else "W"
    return written


def test_the_first_is_whole_and_small_deltas_follow_it_for_as_long_as_they_stay_small():
    assert published(DeltaBase(), [40] * 200) == "W" + "D" * 199


def test_a_new_whole_one_comes_when_a_delta_is_larger_than_a_version_is_on_average():
    growing = [0, *range(30, 1000, 30)]
    # 1000 + 30 + … + 210 are 1,840 for eight versions, 230 each. With 240 they are 231.
    assert published(DeltaBase(), growing)[:10] == "WDDDDDDDDW"


def test_where_no_delta_pays_fewer_and_fewer_are_tried():
    written = published(DeltaBase(), [900] * 100)
    assert written.startswith("WDWWDWWWDWWWWWDWWWWWWWWWD")
    assert written.count("D") < 8


def test_something_wrong_makes_the_next_one_whole():
    base = DeltaBase()
    assert published(base, [40, 40]) == "WD"
    base.forget()
    assert published(base, [40, 40]) == "WD"
    base.note_published(Published("v9", WHOLE, 40, delta_of="another"))
    assert base.next() == ""


@pytest.mark.parametrize(
    ("delta", "dtype", "published"),
    [
        ("auto", "bfloat16", True),
        ("auto", "float32", False),
        ("on", "float32", True),
        ("off", "bfloat16", False),
    ],
)
def test_which_runs_publish_deltas(delta: str, dtype: str, published: bool):
    run = Run(
        id="s-1:train:0",
        session_id="s-1",
        owner="local",
        model=None,
        training=TrainingSpec(),
        dispatcher=None,
        options=RunOptions(delta=delta),
        about=trainer_pb2.DescribeTrainerReply(dtype=dtype),
    )
    assert run.publishes_deltas is published
