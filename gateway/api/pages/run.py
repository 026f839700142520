"""The page of one run."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import orjson
from fastapi import Query
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from gateway.api.fields import PathText
from gateway.api.pages.boards import POINTS, board_of
from gateway.api.pages.live import Changes, live_response
from gateway.api.pages.routing import FORM_CONTENT, Page, PageDep, PageRouter, read_form
from gateway.api.pages.run_facts import read_facts
from gateway.api.pages.templates import fragment
from gateway.api.request_body import FORM_BODY, JSON
from gateway.api.tandem.ends import StopRun, stop_run
from gateway.api.tandem.logs import Level, log_lines
from gateway.api.tandem.runs import own_run
from gateway.identifiers import make_checkpoint_path
from gateway.owners.usage.run_resources import read_run_use
from gateway.runs.record.files import Place
from gateway.runs.record.lineage import ancestors_of
from tandem.errors import InvalidRequest, UnknownRun, UnknownWeights
from tandem.tracking.names import flat

router = PageRouter()

_PARTS = ("run_head", "run_shares", "run_saved", "run_events")
_FULL_LOOK = 5
"""Looks between two that read everything, while no metrics come."""
_CHART_POINTS = 1000
_LOG_LINES = 300


@router.operation("GET", "/runs/{run_id}", role="reader", overseen=True, errors=[UnknownRun])
async def run_page(
    run_id: PathText, page: PageDep, all: Annotated[bool, Query()] = False
) -> Response:
    """Show a run with its curves, `all` of them drawn without a script."""
    gateway = page.gateway
    run = await own_run(run_id, page)
    end = await gateway.record.end_of_metrics(run_id)
    ancestors = await ancestors_of(gateway.record.database, run_id, page.caller.may_see)
    curves = await page.views.curves(run_id, None, POINTS, ancestors)
    facts = await read_facts(gateway, page.views, run)
    relatives = await gateway.run_records.relatives(run, page.caller)
    usage = await read_run_use(gateway.database, run_id)

    def draw() -> Response:
        return page.render(
            "run.html",
            facts=facts,
            board_groups=board_of([facts.index], [curves], marks=facts.marks, every=all),
            config=flat(run.identity.config or {}),
            relatives=relatives,
            usage=usage,
            cursor=end.cursor,
        )

    return await page.draw(draw)


@router.operation("GET", "/runs/{run_id}/curves", role="reader", overseen=True, errors=[UnknownRun])
async def run_curves(
    run_id: PathText,
    page: PageDep,
    name: Annotated[list[str], Query(max_length=200)] = [],  # noqa: B006 - FastAPI copies it
) -> Response:
    """Return curves of these names for the charts."""
    await own_run(run_id, page)
    record = page.gateway.record
    ancestors = await ancestors_of(record.database, run_id, page.caller.may_see)
    found = await record.curves(run_id, name, _CHART_POINTS, ancestors)
    content = {name: curve.as_json() for name, curve in found.items()}
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), media_type=JSON)


@router.operation("GET", "/runs/{run_id}/live", role="reader", overseen=True, errors=[UnknownRun])
async def live_run(
    run_id: PathText,
    page: PageDep,
    after: Annotated[str, Query(pattern="^[0-9]{1,18}-[0-9]{1,9}-[0-9]{1,18}$")] = "0-0-0",
) -> Response:
    """Stream the changed parts of a run's page, and the points of its curves behind a cursor."""
    run = await own_run(run_id, page)
    looks, before = 0, ("", "")

    async def look(cursor: str) -> Changes:
        nonlocal run, looks, before
        rows, end = await page.gateway.record.rows_after(run_id, Place.of_cursor(cursor))
        points: dict[str, list[tuple[int, float | str, float | None]]] = {}
        for row in rows:
            for name, value in row.values.items():
                points.setdefault(name, []).append((row.step, value, row.at))
        state, looks = page.views.state_of(run), looks + 1
        if not rows and state == before and looks % _FULL_LOOK:
            return Changes(cursor)
        run, before = await own_run(run_id, page), state
        facts = await read_facts(page.gateway, page.views, run)

        def draw() -> dict[str, str]:
            about = {"facts": facts, "caller": page.caller}
            return {part: fragment(f"{part}.html", **about) for part in _PARTS}

        return Changes(end.cursor, await page.draw(draw), points)

    return live_response(page, look, cursor=after)


@router.operation(
    "GET",
    "/runs/{run_id}/files/{kind}/{name}",
    role="reader",
    errors=[UnknownWeights, InvalidRequest],
)
async def checkpoint_page(
    run_id: PathText, kind: PathText, name: PathText, page: PageDep
) -> Response:
    """Show a checkpoint's files with addresses for their download."""
    path = make_checkpoint_path(run_id=run_id, kind=kind, name=name)
    found = await page.checkpoint(path)
    addresses, _ = await page.gateway.downloads.sign(path)
    return page.render("checkpoint.html", checkpoint=found, addresses=addresses)


# A browser's form is not JSON.
@router.operation(
    "POST",
    "/runs/{run_id}/stop",
    role="member",
    overseen=True,
    audit="run_stop",
    errors=[UnknownRun],
    raw=FORM_CONTENT,
    bounds=FORM_BODY,
)
async def stop_run_form(request: Request) -> Response:
    """Stop the run and show its page, as `POST /api/tandem/v1/runs/{run_id}/stop` does."""
    run_id = request.path_params["run_id"]
    form = await read_form(request)
    await stop_run(run_id, StopRun(discard="discard" in form), Page(request))
    return RedirectResponse(f"/runs/{quote(run_id, safe=':')}", status_code=303)


@router.operation("GET", "/runs/{run_id}/logs", role="reader", overseen=True, errors=[UnknownRun])
async def run_logs(
    run_id: PathText, page: PageDep, level: Annotated[Level, Query()] = "info"
) -> Response:
    """Show the newest lines of all logs about a run."""
    run = await own_run(run_id, page)
    found = await log_lines(page, run=run_id, level=level, limit=_LOG_LINES)
    return page.render("run_logs.html", run=run, found=found, level=level)
