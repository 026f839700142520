"""Rollouts of a run: a page by step and reward, and one rollout with its tokens in colour."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import orjson
from fastapi import Path, Query
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.fields import Offset, PathText
from gateway.api.pages.routing import PageDep, PageRouter
from gateway.api.pages.texts import shade
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
    texts = (_text(rollout.get("prompt")), _text(rollout.get("answer")), *others.values())
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
        cut=len(tokens) > len(shown) or any(len(text) > most for text in texts),
        colour=colour,
        colours=[
            name
            for name in ("logprob", "advantage")
            if tokens and len(_list(rollout, f"{name}s")) == len(tokens)
        ],
    )


def _tokens(
    request: Request, base_model: str, rollout: Rollout, colour: Colour, most: int | None
) -> list[tuple[str, str, str]]:
    """Return each token's text, its class of `tokens.css` or "", and its title, in a thread.
    Without the model's tokenizer, the text is the id."""
    ids = _list(rollout, "tokens")
    values = _list(rollout, f"{colour}s") if colour else []
    if len(values) != len(ids):
        values = [None] * len(ids)
    numbers = [abs(value) for value in values if isinstance(value, int | float)]
    largest = max(numbers, default=0.0) or 1.0
    try:
        model = request.app.state.gateway.models.get(base_model)
        tokenizer = request.app.state.inference.tokenizer(model)
    except (UnknownModel, UnsupportedInput):
        tokenizer = None
    shown = []
    for id_, value in zip(ids[:most], values[:most], strict=True):
        known = tokenizer and isinstance(id_, int) and 0 <= id_ < 2**31
        token = tokenizer.token(id_) if known else None
        css, title = "", f"token {id_}"
        if isinstance(value, int | float):
            css = _class_of(value, colour, largest)
            title += f", {colour} {value:.4g}"
        shown.append((token.text if token else f"{id_} ", css, title))
    return shown


def _class_of(value: float, colour: Colour, largest: float) -> str:
    if colour == "logprob":
        return f"l{shade(value)}"
    level = round(5 * abs(value) / largest)
    return f"{'p' if value > 0 else 'n'}{level}" if level else ""


def _list(rollout: Rollout, name: str) -> Sequence[object]:
    value = rollout.get(name)
    return value if isinstance(value, list) else []


def _excerpt(rollout: Rollout, name: str) -> str:
    passages = _passages(rollout.get(name), _EXCERPT)
    return " ".join(" ".join(text for _, text in passages[-2:]).split())[:_EXCERPT]


def _passages(value: object, most: int) -> list[tuple[str, str]]:
    """Return a text without a role, or the roles and texts of messages, each text with `most`
    characters. Other values are JSON."""
    if value in (None, ""):
        return []
    messages = [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
    if messages and all(isinstance(one.get("content"), str) for one in messages):
        return [(str(one.get("role", "")), one["content"][:most]) for one in messages]
    return [("", _text(value)[:most])]


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode() if value is not None else ""
