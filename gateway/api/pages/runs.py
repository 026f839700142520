"""The list of runs."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Query
from pydantic import StringConstraints
from starlette.responses import Response

from gateway.api.fields import Offset
from gateway.api.pages.live import Changes, live_response
from gateway.api.pages.routing import PageDep, PageRouter
from gateway.api.pages.templates import fragment
from gateway.runs.record.rows import RunFilters, Sort

router = PageRouter()

_SIZE = 50
_MOST_WATCHED = 200
"""Runs in one stream."""

Text = Annotated[str, StringConstraints(max_length=200), Query()]


@router.operation("GET", "/", role="reader", overseen=True)
async def runs_page(
    page: PageDep,
    offset: Annotated[Offset, Query()] = 0,
    name: Text = "",
    tag: Text = "",
    state: Text = "",
    owner: Text = "",
    sort: Annotated[Sort, Query()] = "newest",
) -> Response:
    """Show the caller's runs, the newest first. Admins and maintainers see everybody's."""
    given = {"name": name, "tag": tag, "state": state, "owner": owner}
    asked = {key: value for key, value in given.items() if value}
    list_runs = partial(page.gateway.run_records.runs, page.caller, scope="accessible")
    found, total = await list_runs(
        filters=RunFilters(**asked), sort=sort, limit=_SIZE, offset=offset
    )
    _, everything = await list_runs(limit=0, offset=0) if asked else ([], total)
    return page.render(
        "runs.html",
        rows=await page.views.rows(found),
        everything=everything,
        total=total,
        offset=offset,
        size=_SIZE,
        filters=given | {"sort": sort},
        asked={**asked, "sort": sort},
    )


@router.operation("GET", "/live/runs", role="reader", overseen=True)
async def live_runs(
    page: PageDep,
    run: Annotated[list[str], Query(max_length=_MOST_WATCHED)] = [],  # noqa: B006 - copied
    total: Annotated[Offset, Query()] = 0,
) -> Response:
    """Stream the changing rows of the list, and the number of runs beyond `total`."""

    async def look(_cursor: str) -> Changes:
        records = page.gateway.run_records
        rows = await page.views.rows(await records.of_ids(run, page.caller))
        parts = {f"run-{row.run.id}": fragment("run_row.html", row=row) for row in rows}
        _, now = await records.runs(page.caller, scope="accessible", limit=0, offset=0)
        parts["newer"] = fragment("newer.html", count=max(0, now - total))
        return Changes(parts=parts)

    return live_response(page, look)
