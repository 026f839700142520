"""The weight versions behind a request's tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query

from gateway.api.dependencies import Access, AccessDep
from gateway.api.fields import Answer, PathText, VersionRunInfo
from gateway.api.routing import Router
from tandem.errors import InvalidRequest, TandemError, UnknownRequest

router = Router("/api/tandem/v1", tag="Tandem")

_MOST_IDS = 1000


class SampledVersions(Answer):
    """`samples` has the versions of each sample's tokens, in order. It is empty for a request that
    was not in flight: then all tokens are from `weight_version`, of the optimizer step
    `weight_step`. An in-flight request ended with `weight_version`."""

    request_id: str
    weight_version: str
    weight_step: int
    samples: list[list[VersionRunInfo]]


class NoVersions(Answer):
    """A request without versions, and why."""

    request_id: str
    error: str
    type: str
    category: Literal["user", "server"]


class ManySampledVersions(Answer):
    """One entry for each id, in the order of the ids."""

    requests: list[SampledVersions | NoVersions]


@router.operation(
    "GET",
    "/samples/versions",
    role="reader",
    errors=[InvalidRequest],
    rules=[f"There are 1 to {_MOST_IDS} ids."],
)
async def many_sampled_versions(
    access: AccessDep, ids: Annotated[list[str], Query()]
) -> ManySampledVersions:
    """Return the weight versions of many ended requests. `ids` are separated by commas, or
    repeated. A request without versions has an error of its own, as the route for one request
    answers."""
    request_ids = [each for text in ids for each in text.split(",") if each]
    if not 1 <= len(request_ids) <= _MOST_IDS:
        raise InvalidRequest(f"{len(request_ids)} ids were given; give 1 to {_MOST_IDS} at once")
    found: dict[str, SampledVersions | NoVersions] = {}
    for request_id in dict.fromkeys(request_ids):
        try:
            found[request_id] = await _versions(request_id, access)
        except TandemError as error:
            found[request_id] = NoVersions.of(error, request_id=request_id, error=error.message)
    return ManySampledVersions(requests=[found[each] for each in request_ids])


@router.operation("GET", "/samples/{request_id}/versions", role="reader", errors=[UnknownRequest])
async def sampled_versions(request_id: PathText, access: AccessDep) -> SampledVersions:
    """Return the weight versions of an ended request. Its id is the prefix of its samples'
    `sequence_id`: `ID:0`, `ID:1` and so on. It is forgotten with the gateway, or after 50,000 other
    requests or four million pieces of samples."""
    return await _versions(request_id, access)


async def _versions(request_id: str, access: Access) -> SampledVersions:
    await access.request(request_id)
    samples = access.gateway.samples
    span, found = samples.find(request_id), samples.versions.find(request_id)
    if span is None or span.error or (span.in_flight and found is None):
        raise UnknownRequest(
            f"request {request_id} has no samples yet, or was forgotten: many others came since, "
            "or the gateway was started again"
        )
    return SampledVersions(
        request_id=request_id,
        weight_version=span.weight_version,
        weight_step=span.weight_step,
        samples=[[VersionRunInfo.of(run) for run in sample] for sample in found or ()],
    )
