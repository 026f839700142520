"""The playground: the queue, and a form for each blueprint."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from gateway.api.pages.live import Changes, live_response
from gateway.api.pages.routing import (
    FORM_CONTENT,
    Page,
    PageDep,
    PageRouter,
    is_browser,
    read_form,
)
from gateway.api.request_body import FORM_BODY, validate
from gateway.api.tandem.playground import (
    PlaygroundChange,
    StartTrial,
    change_playground,
    start_trial,
)
from tandem.errors import InvalidField, TandemError

router = PageRouter()

_VALUE = "value:"
"""Before a parameter's name in a form."""
_MOST_EARLIER = 5


@router.operation("GET", "/playground", role="reader", overseen=True)
async def playground_page(page: PageDep) -> Response:
    """Show the queue, and the blueprints with a form each."""
    return await _render(page, {})


@router.operation("GET", "/playground/live", role="reader", overseen=True)
async def live_playground(page: PageDep) -> Response:
    """Stream the changes of the queue."""

    async def look(_cursor: str) -> Changes:
        part = page.fragment("playground_state.html", **_queue(page))
        return Changes(parts={"playground_state": part})

    return live_response(page, look)


# A browser's form is not JSON.
@router.operation(
    "POST",
    "/playground/switch",
    role="maintainer",
    audit="playground_change",
    raw=FORM_CONTENT,
    bounds=FORM_BODY,
)
async def switch_playground(request: Request) -> Response:
    """Open or close the playground."""
    form = await read_form(request)
    await change_playground(PlaygroundChange(open=form.get("open") == "yes"), Page(request))
    return RedirectResponse("/playground", status_code=303)


# A browser's form is not JSON.
@router.operation(
    "POST",
    "/playground/trials",
    role="member",
    overseen=True,  # a refusal shows the queue again
    audit="trial_start",
    raw=FORM_CONTENT,
    bounds=FORM_BODY,
)
async def start_trial_form(request: Request) -> Response:
    """Start a trial and show its page. After a refusal, the form keeps its values."""
    form, page = await read_form(request), Page(request)
    try:
        trial = await start_trial(_asked(form), page)
    except TandemError as error:
        if not is_browser(request):
            raise
        return await _render(page, form, problem=error.message, status=error.status)
    return RedirectResponse(f"/playground/trials/{trial.id}", status_code=303)


def _asked(form: Mapping[str, str]) -> StartTrial:
    """Return the request of a form. Raises `InvalidField` or `InvalidRequest`."""
    try:
        seed = int(form.get("seed", "0"))
    except ValueError as error:
        raise InvalidField("the seed is no whole number", field="seed") from error
    values = {
        name.removeprefix(_VALUE): value for name, value in form.items() if name.startswith(_VALUE)
    }
    named = {name: form.get(name, "") for name in ("blueprint", "model")}
    return validate(StartTrial, {**named, "values": values, "seed": seed})


async def _render(
    page: Page, form: Mapping[str, str], *, problem: str = "", status: int = 200
) -> Response:
    playground, owner = page.gateway.playground, page.caller.owner
    past = await playground.list_trials(owner, limit=_MOST_EARLIER + 1, offset=0)
    return page.render(
        "playground.html",
        status=status,
        blueprints=await playground.blueprints(),
        models=[model.name for model in page.gateway.models.all()],
        earlier=[trial for trial in past if trial.state == "ended"][:_MOST_EARLIER],
        form=form,
        problem=problem,
        **_queue(page),
    )


def _queue(page: Page) -> dict[str, object]:
    """Return the state of the playground. Visitors do not get the trials of others."""
    playground, caller = page.gateway.playground, page.caller
    found = sorted(playground.all(), key=lambda trial: (trial.created_at, trial.id))
    own = next((trial for trial in found if trial.owner == caller.owner), None)
    return {"playground": playground, "own": own, "trials": found if caller.sees_all else []}
