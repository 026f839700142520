"""In-flight updates: requests continue with newer weights of their run instead of draining.

An in-flight request names the oldest version that it accepts. A newer one of its run serves it once
another in-flight request or load names it. A request never returns to an older version."""

from __future__ import annotations

from sampler_service.weights.loader import LoadableVersion
from sampler_service.work import Work
from tandem.weights import version_number


def may_follow(work: Work, version: LoadableVersion) -> bool:
    """Return whether the work is in flight and `version` is a newer one of its run."""
    mine = work.version
    return (
        work.in_flight
        and bool(mine.run_id)
        and (mine.run_id, mine.adapter) == (version.run_id, version.adapter)
        and version_number(mine.name) < version_number(version.name)
    )


class FollowedVersions:
    """The newest version per run that in-flight work was carried over to."""

    def __init__(self) -> None:
        self._newest: dict[str, LoadableVersion] = {}

    def note(self, version: LoadableVersion) -> None:
        self._newest[version.run_id] = version

    def for_arrival(self, work: Work) -> LoadableVersion | None:
        """Return the version that arriving work must follow, or None."""
        newest = self._newest.get(work.version.run_id)
        return newest if newest is not None and may_follow(work, newest) else None
