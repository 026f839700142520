"""Which weight versions the tokens of a request came from."""

from __future__ import annotations

from gateway.api.dependencies import AccessDep
from gateway.api.fields import Answer, PathText
from gateway.api.routing import Router
from tandem.errors import UnknownRequest

router = Router("/api/tandem/v1", tag="Tandem")


class VersionRunInfo(Answer):
    """So many tokens, one after the other, from one weight version of an optimizer step."""

    version: str
    step: int
    tokens: int


class SampledVersions(Answer):
    """`samples` has the versions of each sample's tokens, in their order. It is empty for a
    request that was not in flight: all of its tokens are from `weight_version`, with which one
    in flight ended."""

    request_id: str
    weight_version: str
    samples: list[list[VersionRunInfo]]


@router.operation("GET", "/samples/{request_id}/versions", role="reader", errors=[UnknownRequest])
async def sampled_versions(request_id: PathText, access: AccessDep) -> SampledVersions:
    """Return which weight versions a request was sampled from, once it has ended. Its id is what
    the `sequence_id` of each of its samples begins with: `ID:0`, `ID:1` and so on. It is forgotten
    with the gateway, or when 50,000 others, or four million pieces of samples, have come since."""
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
