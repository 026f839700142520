"""The weight versions behind a request's tokens."""

from __future__ import annotations

from gateway.api.dependencies import AccessDep
from gateway.api.fields import Answer, PathText
from gateway.api.routing import Router
from tandem.errors import UnknownRequest

router = Router("/api/tandem/v1", tag="Tandem")


class VersionRunInfo(Answer):
    """Consecutive tokens from one weight version of an optimizer step."""

    version: str
    step: int
    tokens: int


class SampledVersions(Answer):
    """`samples` has the versions of each sample's tokens, in order. It is empty for a request that
    was not in flight: then all tokens are from `weight_version`. An in-flight request ended with
    `weight_version`."""

    request_id: str
    weight_version: str
    samples: list[list[VersionRunInfo]]


@router.operation("GET", "/samples/{request_id}/versions", role="reader", errors=[UnknownRequest])
async def sampled_versions(request_id: PathText, access: AccessDep) -> SampledVersions:
    """Return the weight versions of an ended request. Its id is the prefix of its samples'
    `sequence_id`: `ID:0`, `ID:1` and so on. It is forgotten with the gateway, or after 50,000 other
    requests or four million pieces of samples."""
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
        samples=[[VersionRunInfo.of(run) for run in sample] for sample in found or ()],
    )
