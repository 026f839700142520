"""Which releases of the `tinker` SDK this gateway speaks with."""

from __future__ import annotations

import re

from tandem.errors import SdkTooOld

OLDEST = (0, 25)
"""The first that sends forward_backward as protobuf alone, as this gateway takes it."""

TESTED = (0, 27)
"""The first that the conformance suite runs with."""

_RELEASE = re.compile(r"(\d+)\.(\d+)(?:\.\d+)?")


def check_sdk_version(version: str) -> str | None:
    """A warning for the client's log, if any. Raises `SdkTooOld`.

    What is no release number (a build of one's own) is let through: it can still be told by
    what it sends.
    """
    found = _RELEASE.match(version)
    if found is None:
        return None
    release = (int(found[1]), int(found[2]))
    if release < OLDEST:
        raise SdkTooOld(_too_old(f"the SDK tinker {version} is too old for this server"))
    if release < TESTED:
        return (
            f"tinker {version} is older than what this server is tested with; if anything "
            f"fails, install {_WANTED}"
        )
    return None


def json_refused(what: str) -> SdkTooOld:
    """The error for a body as only an old SDK sends it."""
    return SdkTooOld(
        _too_old(
            f"{what} came as JSON, which SDKs older than tinker {OLDEST[0]}.{OLDEST[1]} send; "
            "this server takes protobuf alone"
        )
    )


_WANTED = f"tinker>={TESTED[0]}.{TESTED[1]}"


def _too_old(why: str) -> str:
    return f'{why}. Install {_WANTED}: pip install --upgrade "{_WANTED}"'
