from __future__ import annotations

from gateway.owners.usage.sampled_versions import RememberedVersions, VersionRun
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2

OLD, NEW = (
    tinker_pb2.TandemVersionRun(version=f"run/v{step}", step=step, tokens=10 * step)
    for step in (1, 2)
)


def samples(*runs: list[tinker_pb2.TandemVersionRun]) -> list[sampler_pb2.SampleVersions]:
    return [sampler_pb2.SampleVersions(runs=each) for each in runs]


def test_the_runs_of_each_sample_are_found_in_their_order():
    remembered = RememberedVersions()
    remembered.remember("a", samples([OLD, NEW], [], [NEW]))
    old, new = VersionRun("run/v1", 1, 10), VersionRun("run/v2", 2, 20)
    assert remembered.find("a") == [[old, new], [], [new]]
    assert remembered.find("b") is None


def test_the_oldest_requests_are_forgotten_when_there_are_too_many_runs():
    remembered = RememberedVersions(most_runs=4)
    for name in ("a", "b", "a", "c"):
        remembered.remember(name, samples([OLD, NEW]))
    assert remembered.find("b") is None
    assert remembered.find("a") and remembered.find("a") == remembered.find("c")
    remembered.remember("large", samples(*[[OLD]] * 9))
    assert remembered.find("c") is None
    assert len(remembered.find("large") or ()) == 9
