"""A check: one row of the table that `tandem doctor` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "absent", "problem"]


@dataclass(frozen=True)
class Check:
    """`about` explains the value or gives advice. The level `problem` marks a failure of a
    necessary part, `absent` a part that Tandem can do without."""

    name: str
    value: str
    about: str = ""
    level: Level = "ok"


def judge(
    name: str, value: str, good: object, about: str, otherwise: str, level: Level = "problem"
) -> Check:
    """Return a good check with `about`, or one of the `level` with `otherwise`."""
    return Check(name, value, about) if good else Check(name, value, otherwise, level)


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
