"""What is said of one route. The path, its parameters and the method come from the route itself,
the sentence from the docstring of its function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tandem.errors import TandemError


class AnswerFields(BaseModel):
    """Answers have the fields that are described, and no others."""

    model_config = ConfigDict(extra="forbid")


class Refusal(AnswerFields):
    """A request that was refused. `error` is a sentence for people, `type` a word for programs;
    the category says whether the request was wrong or the platform failed it."""

    error: str
    type: Annotated[str, Field(pattern="^[a-z_]+$")]
    category: Literal["user", "server"]
    limit: str | None = Field(None, description="Of a limit: which one.")
    limit_value: int | None = Field(None, description="Of a limit: what it is.")
    used: int | None = Field(None, description="Of a limit: how much there is.")
    retry_after_seconds: float | None = Field(None, description="Of 429: when to ask again.")
    queue_position: int | None = Field(None, description="Of 429: the place in the queue.")


class AuthRefusal(Refusal):
    """`detail` is the sentence once more, for the `tinker` command."""

    detail: str


@dataclass(frozen=True)
class Binary:
    """A body that is no JSON."""

    media: str
    about: str


Content = type[BaseModel] | Binary


@dataclass(frozen=True)
class Answer:
    """What comes with one status; no `contents`: an empty body."""

    contents: Sequence[Content]
    about: str = ""


@dataclass(frozen=True)
class Header:
    """A header that a request may carry."""

    name: str
    about: str
    choices: Sequence[str] = ()

    @property
    def schema(self) -> dict[str, object]:
        return {"type": "string", **({"enum": list(self.choices)} if self.choices else {})}


@dataclass(frozen=True)
class Described:
    """One route's description.

    `takes` are alternatives of the body; each is a tuple of models that are all read from it,
    as one model reads the run and the place, and another what is asked. `queries` are read
    together, too. `errors` are refused beside what every route refuses: 401 without a key, and
    400 and 413 where there is a body. `rules` are those that the models cannot say: a body that
    fits the schema may still be answered with 400 where there are any. Which role a route needs
    is said in `gateway/access.py`.
    """

    takes: Sequence[tuple[type[BaseModel], ...]] = ()
    takes_binary: Binary | None = None
    body_needed: bool = True
    queries: Sequence[type[BaseModel]] = ()
    headers: Sequence[Header] = ()
    answers: Mapping[int, Answer] = field(default_factory=dict)
    errors: Sequence[type[TandemError]] = ()
    rules: Sequence[str] = ()
    tag: str = "SDK"


def json(*models: type[BaseModel], about: str = "") -> Mapping[int, Answer]:
    """200 with a JSON body of one of these forms."""
    return {200: Answer(contents=models, about=about)}


NO_CONTENT: Mapping[int, Answer] = {204: Answer(contents=())}
