"""In-flight updates: requests that go on with newer weights of their run instead of draining.

A request that is in flight names the version that it needs at least. Any newer version of the same
run serves it, too, once a request or a load that is itself in flight has named that. Versions of a
run are numbered in the order in which it published them; no request ever goes back.
"""

from __future__ import annotations

from sampler_service.weights.loader import WeightVersion
from sampler_service.work import Work
from tandem.weights import version_number


def may_follow(work: Work, version: WeightVersion) -> bool:
    """Whether work is in flight, and the version a newer one of its run."""
    mine = work.version
    return (
        work.in_flight
        and bool(mine.run_id)
        and (mine.run_id, mine.adapter) == (version.run_id, version.adapter)
        and version_number(mine.name) < version_number(version.name)
    )


class Followed:
    """The newest version of each run that what is in flight has gone on with."""

    def __init__(self) -> None:
        self._newest: dict[str, WeightVersion] = {}

    def note(self, version: WeightVersion) -> None:
        self._newest[version.run_id] = version

    def for_arrival(self, work: Work) -> WeightVersion | None:
        """Return the version that work is to follow which has just arrived, None if it has it."""
        newest = self._newest.get(work.version.run_id)
        return newest if newest is not None and may_follow(work, newest) else None
