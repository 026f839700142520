"""The shared parts that each run uses."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.checkpoints.catalog import CheckpointCatalog
from gateway.checkpoints.versions import VersionStore
from gateway.metrics import Metrics
from gateway.owners.usage.meter import UsageMeter
from gateway.owners.usage.time_shares import Timelines
from gateway.runs.custom_losses import LOSS_NAME, CustomLossStore
from gateway.runs.journal import Journal
from gateway.runs.operations import Body, LossReference
from gateway.runs.record.rows import RunRecords
from gateway.runs.record.store import RecordStore
from gateway.runs.recovery.snapshots import SnapshotStore
from gateway.sampling.router import SamplerRouter
from gateway.sampling.sessions import SamplingSessionRegistry
from tandem.settings.gateway import GatewaySettings


@dataclass(frozen=True, kw_only=True)
class RunTools:
    settings: GatewaySettings
    journal: Journal
    records: RunRecords
    record: RecordStore
    checkpoints: CheckpointCatalog
    versions: VersionStore
    snapshots: SnapshotStore
    samplers: SamplerRouter
    sampling: SamplingSessionRegistry
    usage: UsageMeter
    timelines: Timelines
    metrics: Metrics
    custom_losses: CustomLossStore

    async def definition_of(self, body: Body | None, *, session_id: str) -> bytes:
        """Return the definition of a request's loss, empty for none. Raises `UnknownLoss`."""
        if isinstance(body, LossReference) and body.loss_fn == LOSS_NAME:
            return await self.custom_losses.definition(body.loss_id, session_id=session_id)
        return b""
