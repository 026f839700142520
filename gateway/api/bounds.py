"""Bounds of samples in requests: who may set them, and the check of a version."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from gateway.checkpoints.versions import WeightVersion
from gateway.core import Gateway
from gateway.sampling.bounds import Bounds
from gateway.sampling.sampler import Check
from gateway.sampling.sessions import SamplingSession
from tandem.errors import InvalidRequest
from tandem.v1 import common_pb2

Bound = Annotated[int, Field(ge=0, le=2**53)]


class BoundFields(BaseModel):
    """`min_version` is the least number of the run's weight version, `max_staleness` the most
    optimizer steps behind the run's trainer."""

    min_version: Bound | None = None
    max_staleness: Bound | None = None

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.min_version, self.max_staleness)


async def check_may_bound(
    gateway: Gateway, version: WeightVersion, bounds: Bounds, *, owner: str
) -> None:
    """Raise `InvalidRequest` if the owner cannot bound a version: a base model has only one, and
    another owner's trainer is not shown."""
    if bounds == Bounds():
        return
    if not version.run_id:
        bounds.check(version.to_proto(), trainer_step=None)
    elif (await gateway.checkpoints.origin(version.run_id)).owner != owner:
        raise InvalidRequest(
            "min_version and max_staleness bound the weights of your own runs, and these are "
            "another owner's; leave them out"
        )


def version_check(gateway: Gateway, asked: Bounds, session: SamplingSession | None = None) -> Check:
    """Return the check of a sample's version against its request and its session."""

    def check(version: common_pb2.WeightVersion) -> None:
        run = gateway.runs.get(version.run_id)
        step = run.step if run is not None and run.error is None else None
        asked.check(version, trainer_step=step)
        if session is not None:
            session.bounds.check(version, trainer_step=step)

    return check
