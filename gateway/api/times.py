"""Days and moments as clients write them: ISO 8601, and no number of seconds."""

from __future__ import annotations

import datetime as dt
import re
from typing import Annotated

from pydantic import AwareDatetime, BeforeValidator

_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def _written_day(value: object) -> object:
    if isinstance(value, str) and not _DAY.fullmatch(value):
        raise ValueError("a day is written as in 2026-07-13")
    return value


def _written_moment(value: object) -> object:
    if not isinstance(value, dt.datetime) and not (
        isinstance(value, str) and _DAY.match(value.strip())
    ):
        raise ValueError("a moment is written as in 2026-07-13T00:00:00Z")
    return value


Day = Annotated[dt.date, BeforeValidator(_written_day)]
Moment = Annotated[AwareDatetime, BeforeValidator(_written_moment)]
