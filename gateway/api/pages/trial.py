"""The page of a trial of the playground: its place, its runs, and its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from gateway.api.fields import PathText
from gateway.api.pages.boards import POINTS, Plot, board_of
from gateway.api.pages.live import Changes, live_response
from gateway.api.pages.routing import FORM_CONTENT, Page, PageDep, PageRouter
from gateway.api.pages.run_views import RunRow
from gateway.api.request_body import FORM_BODY
from gateway.api.tandem.playground import end_trial, own_trial
from gateway.api.tandem.runs import own_run
from gateway.checkpoints.catalog import Checkpoint
from gateway.playground.queue import Trial
from gateway.runs.record.rows import RunFilters
from tandem.blueprints.description import Blueprint
from tandem.errors import InvalidField, InvalidRequest, UnknownRun, UnknownTrial, UnknownWeights
from tandem.weights.model_store import read_record
from tandem.weights.serving import (
    ServedCheckpoint,
    hub_address,
    inference_service_yaml,
    vllm_script,
)

router = PageRouter()

_PARTS = ("trial_state", "trial_actions", "trial_results")
_FULL_LOOK = 3
"""Looks between two that read the runs of an unchanged trial."""
_MOST_RUNS = 10
_MOST_PLOTS = 6
"""Of a run."""


@dataclass(frozen=True)
class TrialFacts:
    """`left` is the time in seconds. Each run has its first plots. `serving` has texts that serve
    the weights elsewhere, by title."""

    trial: Trial
    place: int
    why_waits: str
    left: float
    tokens: int
    most_tokens: int
    runs: Sequence[tuple[RunRow, Sequence[Plot]]]
    blueprint: Blueprint | None
    weights: Checkpoint | None
    serving: Mapping[str, str]


@router.operation(
    "GET", "/playground/trials/{trial_id}", role="reader", overseen=True, errors=[UnknownTrial]
)
async def trial_page(trial_id: PathText, page: PageDep) -> Response:
    """Show a trial, even after its end."""
    facts = await _read_facts(page, await own_trial(trial_id, page))
    return await page.draw(lambda: page.render("trial.html", facts=facts))


@router.operation(
    "GET", "/playground/trials/{trial_id}/live", role="reader", overseen=True, errors=[UnknownTrial]
)
async def live_trial(trial_id: PathText, page: PageDep) -> Response:
    """Stream the changed parts of a trial's page."""
    trial = await own_trial(trial_id, page)
    looks, before = 0, ("", 0)

    async def look(_cursor: str) -> Changes:
        nonlocal trial, looks, before
        if before[0] == "ended":
            return Changes()
        trial = await page.gateway.playground.find_trial(trial_id)
        now, looks = (trial.state, page.gateway.playground.place_of(trial)), looks + 1
        if now == before and looks % _FULL_LOOK:
            return Changes()
        facts, before = await _read_facts(page, trial), now

        def draw() -> dict[str, str]:
            return {part: page.fragment(f"{part}.html", facts=facts) for part in _PARTS}

        return Changes(parts=await page.draw(draw))

    return live_response(page, look)


# A browser's form is not JSON.
@router.operation(
    "POST",
    "/playground/trials/{trial_id}/end",
    role="member",
    overseen=True,
    audit="trial_end",
    errors=[UnknownTrial],
    raw=FORM_CONTENT,
    bounds=FORM_BODY,
)
async def end_trial_form(request: Request) -> Response:
    """End a trial and show its page, or the queue if it is another owner's."""
    page = Page(request)
    ended = await end_trial(request.path_params["trial_id"], page)
    own = ended.owner == page.caller.owner
    to = f"/playground/trials/{ended.id}" if own else "/playground"
    return RedirectResponse(to, status_code=303)


async def _read_facts(page: Page, trial: Trial) -> TrialFacts:
    playground = page.gateway.playground
    place = playground.place_of(trial)
    found, _ = await page.gateway.run_records.runs(
        page.caller,
        scope="accessible",
        filters=RunFilters(project_id=trial.id, owner=trial.owner),
        sort="oldest",
        limit=_MOST_RUNS,
        offset=0,
    )
    rows = await page.views.rows(found)
    blueprint = (await playground.blueprints()).get(trial.blueprint)
    weights, serving = await _serve(page, trial)
    return TrialFacts(
        trial=trial,
        place=place,
        why_waits=playground.why_waits(trial),
        left=max(0.0, (trial.ends_at or 0.0) - playground.clock()),
        tokens=playground.used_tokens.get(trial.id, 0),
        most_tokens=playground.settings.tokens,
        runs=[(row, await _plots(page, row)) for row in rows],
        blueprint=blueprint if isinstance(blueprint, Blueprint) else None,
        weights=weights,
        serving=serving,
    )


async def _plots(page: Page, row: RunRow) -> list[Plot]:
    curves = await page.views.curves(row.run.id, None, POINTS)
    groups = await page.draw(lambda: board_of([row.index], [curves]))
    return [plot for group in groups.values() for plot in group][:_MOST_PLOTS]


async def _serve(page: Page, trial: Trial) -> tuple[Checkpoint | None, Mapping[str, str]]:
    """Return the weights of an open trial, and texts that serve them elsewhere. A maintainer gets
    none of others."""
    caller = page.caller
    mine = caller.role == "admin" or caller.owner == trial.owner
    if trial.state != "open" or not trial.weights or not mine:
        return None, {}
    try:
        found = await page.checkpoint(trial.weights)
        run = await own_run(found.path.run_id, page)
    except (UnknownWeights, UnknownRun, InvalidRequest):  # deleted meanwhile
        return None, {}
    entry = next((each for each in page.gateway.models.all() if each.name == trial.model), None)
    record = await asyncio.to_thread(read_record, Path(entry.path)) if entry else None
    lora = run.training.lora

    def served(base: str) -> ServedCheckpoint:
        return ServedCheckpoint(
            path=trial.weights,
            rank=lora.rank if lora else None,
            base=hub_address(record) if record else base,
            name=trial.id,
        )

    try:
        manifest = inference_service_yaml(served("s3://BUCKET/BASE"), storage="s3://BUCKET/TUNED")
        return found, {"vllm serve": vllm_script(served("./BASE")), "KServe": manifest}
    except InvalidField as error:
        return found, {"Elsewhere": error.message}
