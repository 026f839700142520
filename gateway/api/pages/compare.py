"""Several runs side by side: curves in one chart for each metric, and configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated
from urllib.parse import urlencode

from fastapi import Query
from starlette.responses import Response

from gateway.api.pages.boards import POINTS, board_of
from gateway.api.pages.charts import COLOURS
from gateway.api.pages.routing import PageDep, PageRouter
from gateway.api.pages.run_views import flat
from gateway.api.tandem.runs import own_run
from tandem.errors import InvalidRequest, UnknownRun

router = PageRouter()


@router.operation(
    "GET",
    "/compare",
    role="reader",
    errors=[UnknownRun, InvalidRequest],
    rules=["Two to eight different runs."],
)
async def compare_page(
    page: PageDep,
    run: Annotated[list[str], Query(max_length=100)] = [],  # noqa: B006 - FastAPI copies it
    all: Annotated[bool, Query()] = False,
) -> Response:
    """Show curves of the same names together, `all` of them drawn without a script, and the
    differences of the configurations."""
    ids = list(dict.fromkeys(run))
    if not 2 <= len(ids) <= COLOURS:
        raise InvalidRequest(f"you chose {len(ids)} runs; choose 2 to {COLOURS} in the list")
    found = [await own_run(run_id, page) for run_id in ids]
    curves = [await page.views.curves(run_id, None, POINTS) for run_id in ids]
    rows = await page.views.rows(found)

    def draw() -> Response:
        settings = [flat(each.identity.config) for each in found]
        return page.render(
            "compare.html",
            rows=rows,
            board_groups=board_of([row.index for row in rows], curves, every=all),
            different=_table(settings, differs=True),
            same=_table(settings, differs=False),
            all_at="?" + urlencode([*(("run", each) for each in ids), ("all", "1")]),
        )

    return await page.draw(draw)


def _table(
    settings: Sequence[Mapping[str, object]], *, differs: bool
) -> dict[str, list[object | None]]:
    """Return the settings that differ between the runs, or the others, by name."""
    names = sorted({name for each in settings for name in each})
    rows = {name: [each.get(name) for each in settings] for name in names}
    return {
        name: values
        for name, values in rows.items()
        if any(value != values[0] for value in values) == differs
    }
