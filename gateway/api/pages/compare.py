"""Several runs side by side: curves in one chart for each metric, and configurations."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlencode

from fastapi import Query
from starlette.responses import Response

from gateway.api.pages.boards import POINTS, board_of
from gateway.api.pages.charts import COLOURS
from gateway.api.pages.routing import PageDep, PageRouter
from gateway.api.tandem.runs import own_run
from gateway.runs.record.lineage import ancestors_of
from tandem.errors import InvalidRequest, UnknownRun
from tandem.tracking.names import flat

router = PageRouter()


@router.operation(
    "GET",
    "/compare",
    role="reader",
    overseen=True,
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
    curves = []
    for run_id in ids:
        ancestors = await ancestors_of(page.gateway.record.database, run_id, page.caller.may_see)
        curves.append(await page.views.curves(run_id, None, POINTS, ancestors))
    rows = await page.views.rows(found)

    def draw() -> Response:
        configs = [flat(each.identity.config or {}) for each in found]
        names = sorted({name for each in configs for name in each})
        settings = {name: [each.get(name) for each in configs] for name in names}
        different = {
            name: values
            for name, values in settings.items()
            if any(value != values[0] for value in values)
        }
        return page.render(
            "compare.html",
            rows=rows,
            board_groups=board_of([row.index for row in rows], curves, every=all),
            different=different,
            same={name: settings[name] for name in names if name not in different},
            all_at="?" + urlencode([*(("run", each) for each in ids), ("all", "1")]),
        )

    return await page.draw(draw)
