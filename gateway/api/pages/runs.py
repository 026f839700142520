"""The list of runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from gateway.api.fields import Offset
from gateway.api.pages.routing import PageDep, PageRouter

router = PageRouter()

_PAGE = 50


@router.operation("GET", "/", role="reader")
async def runs_page(page: PageDep, offset: Annotated[Offset, Query()] = 0) -> Response:
    """Show the caller's runs, newest first. An admin sees everybody's."""
    found, total = await page.gateway.run_records.runs(
        page.caller, scope="accessible", limit=_PAGE, offset=offset
    )
    return page.render("runs.html", runs=found, total=total, offset=offset, size=_PAGE)
