"""Which weight versions the tokens of a request came from."""

from __future__ import annotations

from gateway.api.dependencies import AccessDep
from gateway.api.fields import Answer, PathText
from gateway.api.routing import Router
from gateway.usage.meter import REMEMBERED_SAMPLES
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
    with the gateway, and when 50,000 others have ended since."""
    await access.request(request_id)
    span = access.gateway.samples.find(request_id)
    if span is None or span.error:
        raise UnknownRequest(
            f"request {request_id} has not been answered with samples, or before the gateway was "
            f"started or {REMEMBERED_SAMPLES:,} others ended"
        )
    return SampledVersions(
        request_id=request_id,
        weight_version=span.weight_version,
        samples=[[VersionRunInfo.of(run) for run in sample] for sample in span.samples],
    )
