"""Rollouts of a run: a page by step and reward, and one rollout with its tokens in colour."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeGuard

import orjson
from fastapi import Path, Query
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.fields import Offset, PathText
from gateway.api.pages.chat import shade_of
from gateway.api.pages.routing import PageDep, PageRouter
from gateway.api.tandem.runs import own_run
from gateway.runs.record.rollouts import Order, Rollout
from tandem.errors import InvalidRequest, UnknownModel, UnknownRun, UnsupportedInput

router = PageRouter()

Colour = Literal["", "logprob", "advantage"]
Number = Annotated[int, Path(ge=0, le=2**53)]

_PAGE = 25
_EXCERPT, _MOST_CHARACTERS, _MOST_TOKENS = 400, 20_000, 4000
"""Characters in the list, and characters of a field and tokens in a rollout before "show all"."""
_SHOWN = ("prompt", "answer", "tokens", "logprobs", "advantages", "index", "step", "at")


@dataclass(frozen=True)
class RolloutToken:
    """`shade` is a class of `tokens.css`, "" without colour."""

    text: str
    shade: str
    title: str


@dataclass(frozen=True)
class Passage:
    """A text, cut after `_MOST_CHARACTERS`. `role` is that of a message, "" for plain text."""

    role: str
    text: str


@router.operation("GET", "/runs/{run_id}/rollouts", role="reader", errors=[UnknownRun])
async def rollouts_page(
    run_id: PathText,
    page: PageDep,
    step: Annotated[str, Query(pattern="^([0-9]{1,15})?$")] = "",
    order: Annotated[Order, Query()] = "given",
    search: Annotated[str, Query(max_length=200)] = "",
    offset: Annotated[Offset, Query()] = 0,
) -> Response:
    """Show the rollouts of a step, of the newest one by default."""
    run = await own_run(run_id, page)
    found = await page.gateway.record.rollouts(
        run_id, int(step) if step else None, order, search, _PAGE, offset
    )
    return page.render(
        "rollouts.html",
        run=run,
        found=found,
        excerpts=[
            (one, _excerpt(one, "prompt"), _excerpt(one, "answer")) for one in found.rollouts
        ],
        order=order,
        search=search,
        offset=offset,
        size=_PAGE,
    )


@router.operation(
    "GET",
    "/runs/{run_id}/rollouts/{step}/{index}",
    role="reader",
    errors=[UnknownRun],
    rules=["The step must have the rollout."],
)
async def rollout_page(
    run_id: PathText,
    step: Number,
    index: Number,
    page: PageDep,
    request: Request,
    colour: Annotated[Colour, Query()] = "",
    whole: Annotated[bool, Query()] = False,
) -> Response:
    """Show one rollout, `index` in the order of arrival."""
    run = await own_run(run_id, page)
    found = await page.gateway.record.rollouts(run_id, step, "given", "", 1, index)
    if not found.rollouts:
        raise InvalidRequest(f"step {step} of this run has no rollout {index}; choose another")
    rollout, most = found.rollouts[0], 2**30 if whole else _MOST_CHARACTERS
    tokens = _list(rollout, "tokens")
    shown = await asyncio.to_thread(
        _tokens, request, run.base_model, rollout, colour, None if whole else _MOST_TOKENS
    )
    others = {name: _text(value) for name, value in rollout.items() if name not in _SHOWN}
    long = (len(_text(rollout.get(name))) for name in ("prompt", "answer"))
    return page.render(
        "rollout.html",
        run=run,
        step=step,
        rollout=rollout,
        prompt=_passages(rollout.get("prompt"), most),
        answer=_passages(rollout.get("answer"), most),
        tokens=shown,
        tokens_in_all=len(tokens),
        others={name: text[:most] for name, text in others.items()},
        cut=len(tokens) > len(shown) or max(*long, *map(len, others.values()), 0) > most,
        colour=colour,
        colours=[
            (name, label)
            for name, label in (("logprob", "logprobs"), ("advantage", "advantages"))
            if tokens and len(_list(rollout, label)) == len(tokens)
        ],
    )


def _tokens(
    request: Request, base_model: str, rollout: Rollout, colour: Colour, most: int | None
) -> list[RolloutToken]:
    """Return the tokens' texts and shades, in a thread. Without the model's tokenizer, the text is
    the id."""
    ids = _list(rollout, "tokens")
    values = _list(rollout, f"{colour}s") if colour else []
    if len(values) != len(ids):
        values = [None] * len(ids)
    numbers = [abs(value) for value in values if isinstance(value, int | float)]
    largest = max(numbers, default=0.0) or 1.0
    try:
        model = request.app.state.gateway.models.get(base_model)
        texts = request.app.state.inference.tokenizer(model).token
    except (UnknownModel, UnsupportedInput):
        texts = _no_text
    return [
        RolloutToken(
            text=found.text if _is_id(id_) and (found := texts(id_)) else f"{id_} ",
            shade=_shade(value, colour, largest),
            title=f"token {id_}" + (f", {colour} {value:.4g}" if _is_number(value) else ""),
        )
        for id_, value in zip(ids[:most], values[:most], strict=True)
    ]


def _no_text(_id: int) -> None:
    return None


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value < 2**31


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _shade(value: object, colour: Colour, largest: float) -> str:
    if not isinstance(value, int | float):
        return ""
    if colour == "logprob":
        return f"l{shade_of(value)}"
    level = round(5 * abs(value) / largest)
    return f"{'p' if value > 0 else 'n'}{level}" if level else ""


def _list(rollout: Rollout, name: str) -> Sequence[object]:
    value = rollout.get(name)
    return value if isinstance(value, list) else []


def _excerpt(rollout: Rollout, name: str) -> str:
    passages = _passages(rollout.get(name), _EXCERPT)
    return " ".join(" ".join(passage.text for passage in passages[-2:]).split())[:_EXCERPT]


def _passages(value: object, most: int) -> list[Passage]:
    """Return a text, or the texts of a list of messages. Other values are JSON."""
    if value in (None, ""):
        return []
    messages = [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
    if messages and all(isinstance(one.get("content"), str) for one in messages):
        return [Passage(str(one.get("role", "")), one["content"][:most]) for one in messages]
    return [Passage("", _text(value)[:most])]


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode() if value is not None else ""
