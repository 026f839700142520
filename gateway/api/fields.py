"""Base classes and field types of request and response models."""

from __future__ import annotations

import datetime as dt
import re
from typing import Annotated, Literal, Self

from pydantic import (
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
)
from pydantic.json_schema import SkipJsonSchema

_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


class Answer(BaseModel):
    """Base of response models, which have no undeclared fields. Unset fields are left out."""

    model_config = ConfigDict(extra="forbid", from_attributes=True, protected_namespaces=())

    @classmethod
    def of(cls, source: object, **others: object) -> Self:
        """Return the answer with `others`, and with equally named attributes of `source`."""
        same = {name: getattr(source, name) for name in cls.model_fields if name not in others}
        return cls.model_validate({**same, **others})

    def only(self, *shown: str) -> Self:
        """Return the answer with empty values in its other fields."""
        hidden = {name: type(value)() for name, value in self if name not in shown}
        return self.model_copy(update=hidden)


def _iso(seconds: object) -> object:
    """Return seconds since 1970 (in UTC), or a moment, as ISO 8601 text. Text stays."""
    if isinstance(seconds, int | float):
        return dt.datetime.fromtimestamp(seconds, tz=dt.UTC).isoformat()
    return seconds.isoformat() if isinstance(seconds, dt.datetime) else seconds


def _written(value: object) -> object:
    written = isinstance(value, str) and _DAY.match(value.strip())
    if not written and not isinstance(value, dt.date):
        raise ValueError("a time is written as in 2026-07-13 or 2026-07-13T00:00:00Z")
    return value


def _whole(value: object) -> object:
    """JSON has one kind of numbers: 5470.0 is whole. Text and true are no numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a whole number is needed")
    return value


Time = Annotated[
    str, BeforeValidator(_iso), WithJsonSchema({"type": "string", "format": "date-time"})
]
"""A moment in an answer: seconds since 1970, written as ISO 8601."""

Day = Annotated[dt.date, BeforeValidator(_written)]
"""A day in a request: ISO 8601 only, never seconds."""

Moment = Annotated[AwareDatetime, BeforeValidator(_written)]
"""A moment in a request: ISO 8601 with a time zone, never seconds."""

Omitted = SkipJsonSchema[None]
"""The value of a missing query parameter, since a query cannot contain null."""

WholeNumber = Annotated[int, Field(ge=0, le=2**53), BeforeValidator(_whole)]
"""A number of things in a request."""

PathText = Annotated[str, StringConstraints(min_length=1)]
UserMetadata = dict[str, str] | None
Limit = Annotated[int, Field(ge=0, le=1000)]
Offset = Annotated[int, Field(ge=0, le=2**53)]
ProjectFilter = Annotated[str | Omitted, Field(max_length=200)]


class VersionRunInfo(Answer):
    """Consecutive tokens from one weight version of an optimizer step."""

    version: str
    step: int
    tokens: int


class Refusal(Answer):
    """A refused request. `error` is a sentence for people, `type` a word for programs. The category
    tells whether the request was wrong or the platform failed."""

    error: str
    type: Annotated[str, Field(pattern="^[a-z_]+$")]
    category: Literal["user", "server"]
    limit: str | None = Field(None, description="Of a limit: which one.")
    limit_value: int | None = Field(None, description="Of a limit: its value.")
    used: int | None = Field(None, description="Of a limit: how much is used.")
    retry_after_seconds: float | None = Field(
        None, description="Of 429, 503 and 507: when to try again."
    )
    field: str | None = Field(None, description="Of `invalid_field`: the setting's dotted path.")
    queue_position: int | None = Field(None, description="Of 429: the position in the queue.")


class AuthRefusal(Refusal):
    """`detail` repeats the sentence for the `tinker` command."""

    detail: str
