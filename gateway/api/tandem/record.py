"""Metrics and rollouts of runs, and their curves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from fastapi import Query
from pydantic import BaseModel, Field, StringConstraints
from starlette.responses import Response

from gateway.api.dependencies import Access, AccessDep
from gateway.api.fields import Answer, Limit, Offset, Omitted, PathText
from gateway.api.request_body import JSON, MOST_VALUES, SMALL_BODY, TOKENS_BODY, BodyBounds
from gateway.api.routing import Router
from gateway.identifiers import unknown_run
from gateway.runs.record.curves import Curve
from gateway.runs.record.files import Place
from gateway.runs.record.lineage import Ancestor, ancestors_of
from gateway.runs.record.metrics import MetricsRow
from gateway.runs.record.rollouts import Order, RolloutPage
from gateway.runs.record.store import RecordStore
from tandem.errors import StorageFailed, StorageFull, UnknownRun, describe
from tandem.telemetry import get_log

router = Router("/api/tandem/v1", tag="Tandem")

_METRICS_BODY = BodyBounds(4 * SMALL_BODY, values=4 * MOST_VALUES)
_DISK = (StorageFailed, StorageFull)
_READ_SECONDS = 5.0

Step = Annotated[int, Field(ge=0, le=2**53)]
Name = Annotated[str, StringConstraints(max_length=200)]
Number = float | str
"""A number, or the text NaN, Infinity or -Infinity."""


class NewMetricsRow(BaseModel):
    """`at` is in seconds since 1970, by default the arrival. A value is a number, or the text NaN,
    Infinity or -Infinity."""

    step: Step
    at: float | None = Field(None, ge=0, le=2**40, allow_inf_nan=False)
    values: dict[str, float]


class NewMetrics(BaseModel):
    rows: list[NewMetricsRow]


class ServerRow(Answer):
    """A row of the server's metrics, with names that begin with `tandem/`."""

    step: int
    at: float
    values: dict[str, Number]


class MetricsWritten(Answer):
    """`rows` are written, `dropped` ones exceed a limit, and `why` is a sentence about the last.
    `server_rows` are the server's behind the cursor `server_after`. Send `0` first, and then
    each `server_cursor`."""

    rows: int
    dropped: int
    why: str
    server_rows: list[ServerRow]
    server_cursor: str


class CurvePoints(Answer):
    """Three lists of one length, in the order of steps. `at` is in seconds since 1970."""

    step: list[int]
    value: list[Number]
    at: list[float]


class Curves(Answer):
    metrics: dict[str, CurvePoints]


class NewRollouts(BaseModel):
    """`batch` is a key of the client's choice, such as a random one. A rollout is an object with
    any fields. The page shows `prompt`, `answer`, `reward`, `advantage`, `tokens`, `logprobs` and
    `advantages`."""

    batch: Annotated[str, StringConstraints(min_length=1, max_length=100)]
    step: Step
    rollouts: list[dict[str, Any]]


class RolloutsWritten(Answer):
    """`dropped` rollouts exceed a limit, and `why` is a sentence about it."""

    rollouts: int
    dropped: int
    why: str


async def _check_owner(run_id: str, access: Access) -> None:
    """Raises `UnknownRun`."""
    if not access.caller.may_see(await access.gateway.record.owner_of(run_id)):
        raise unknown_run(run_id)
    await access.check_run(run_id)


@router.operation(
    "POST",
    "/runs/{run_id}/metrics",
    role="ci",
    audit=None,  # a run sends many
    errors=[UnknownRun, *_DISK],
    rules=["`server_after` is `0` or a `server_cursor`."],
    bounds=_METRICS_BODY,
)
async def add_metrics(
    run_id: PathText,
    body: NewMetrics,
    access: AccessDep,
    server_after: Annotated[
        str | Omitted, Query(pattern="^[0-9]{1,18}(-[0-9]{1,9}-[0-9]{1,18})?$")
    ] = None,
) -> MetricsWritten:
    """Write rows of metrics, also after the run's end. The last row of a step counts, for each
    name. Rows beyond 200 names or 64 KiB, and rows of a record beyond 2 GiB, are dropped. After a
    507 or 503, send the rows again."""
    await _check_owner(run_id, access)
    record = access.gateway.record
    rows = [MetricsRow(row.step, row.values, row.at) for row in body.rows]
    written = await record.append_metrics(run_id, rows, "user")
    found: Sequence[MetricsRow] = ()
    if server_after is not None:
        found, server_after = await _server_rows(record, run_id, server_after)
    return MetricsWritten(
        rows=written.written,
        dropped=written.dropped,
        why=written.why,
        server_rows=[ServerRow.of(row) for row in found],
        server_cursor=server_after or "",
    )


@router.operation(
    "GET",
    "/runs/{run_id}/metrics",
    role="reader",
    overseen=True,
    errors=[UnknownRun, *_DISK],
    response_model=Curves,
)
async def run_metrics(
    run_id: PathText,
    access: AccessDep,
    name: Annotated[list[Name], Query(max_length=20)] = [],  # noqa: B006 - FastAPI copies it
    points: Annotated[int, Query(ge=2, le=1_000_000)] = 1000,
    lineage: Annotated[bool, Query()] = False,
) -> Response:
    """Return the curves of up to 20 names, by default of all. A curve of more than `points` points
    keeps the least and the greatest of neighbouring ones. `lineage` puts the curves of the runs
    before it first, up to the step from which this run continued."""
    await _check_owner(run_id, access)
    record = access.gateway.record
    before: list[Ancestor] = []
    if lineage:
        before = await ancestors_of(record.database, run_id, access.caller.may_see)
    found = await record.curves(run_id, name or None, points, before)
    return Response(await asyncio.to_thread(_curves_body, found), media_type=JSON)


@router.operation(
    "POST",
    "/runs/{run_id}/rollouts",
    role="ci",
    audit=None,  # a run sends many
    errors=[UnknownRun, *_DISK],
    bounds=TOKENS_BODY,
)
async def add_rollouts(run_id: PathText, body: NewRollouts, access: AccessDep) -> RolloutsWritten:
    """Write a batch of rollouts, also after the run's end. A repeated `batch` changes nothing.
    Rollouts beyond 1 MiB are dropped. After a 507 or 503, send the batch again."""
    await _check_owner(run_id, access)
    written = await access.gateway.record.append_rollouts(
        run_id, body.batch, body.step, body.rollouts
    )
    return RolloutsWritten(rollouts=written.written, dropped=written.dropped, why=written.why)


@router.operation(
    "GET",
    "/runs/{run_id}/rollouts",
    role="reader",
    errors=[UnknownRun, *_DISK],
    response_model=RolloutPage,
)
async def run_rollouts(
    run_id: PathText,
    access: AccessDep,
    step: Annotated[Step | Omitted, Query()] = None,
    order: Annotated[Order, Query()] = "given",
    search: Annotated[str, Query(max_length=1000)] = "",
    limit: Annotated[Limit, Query()] = 50,
    offset: Annotated[Offset, Query()] = 0,
    before: Annotated[Step | Omitted, Query()] = None,
) -> Response:
    """Return rollouts of a step, by default of the newest, or of the newest before `before`.
    `order` is `given`, `reward` or `-reward`. `search` is a text in any field, in any case. A page
    ends early after 16 MiB."""
    await _check_owner(run_id, access)
    page = await access.gateway.record.rollouts(run_id, step, order, search, limit, offset, before)
    return Response(await asyncio.to_thread(orjson.dumps, page), media_type=JSON)


async def _server_rows(
    record: RecordStore, run_id: str, after: str
) -> tuple[Sequence[MetricsRow], str]:
    """Return the server's rows behind a cursor, and the next cursor.

    A failing or slow read returns none: the client must not send stored rows again."""
    try:
        async with asyncio.timeout(_READ_SECONDS):
            place = Place.of_cursor(after)
            found, end = await record.rows_after(run_id, place, only_server=True)
    except (StorageFailed, TimeoutError) as error:
        get_log().warning("server_rows_not_read", run_id=run_id, reason=describe(error))
        return (), after
    return found, end.cursor


def _curves_body(curves: dict[str, Curve]) -> bytes:
    found = {name: curve.as_json() for name, curve in curves.items()}
    return orjson.dumps({"metrics": found}, option=orjson.OPT_SERIALIZE_NUMPY)
