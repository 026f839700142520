"""Requests of both SDKs and of our own routes, recorded in `tests/golden/requests`, mean today what
they meant when they were recorded. `python -m scripts.record_requests` records changes."""

from __future__ import annotations

import json

import pytest
import tinker

from tests.support.gateway.recorded_clients import known_options, recorded_options
from tests.support.gateway.recordings import (
    CHANGELOG,
    Replay,
    fingerprint,
    names,
    read_lines,
    replaying_gateway,
)
from tests.support.waiting import wait_until

ADVICE = (
    "the recorded requests have other outcomes: if that is intended, run `python -m "
    "scripts.record_requests`, and describe the change in CHANGELOG.md with the new fingerprint"
)


@pytest.mark.parametrize("name", names())
def test_recorded_requests_have_the_recorded_statuses_specifications_and_pods(name):
    lines, workers = read_lines(name), read_lines(f"{name}.workers")
    with replaying_gateway() as gate:
        replay = Replay(gate, lines)
        expected = sum("worker" in line for line in workers)
        wait_until(lambda: len(gate.launcher.specs) >= expected, what=f"workers start: {ADVICE}")
        found = replay.workers()
    for is_, was in ((replay.lines, lines), (found, workers)):
        assert list(map(json.dumps, is_)) == list(map(json.dumps, was)), ADVICE


def test_both_releases_of_the_sdk_and_all_options_of_runs_are_recorded():
    assert names() == ["sdk-0.27.2", f"sdk-{tinker.__version__}", "tandem"]
    assert known_options() <= recorded_options()


def test_a_changed_recording_is_named_in_the_changelog():
    assert f"`{fingerprint()}`" in CHANGELOG.read_text(), (
        "CHANGELOG.md does not name the recorded requests: describe the change in the line of "
        f"recorded requests, and write `{fingerprint()}` there"
    )
