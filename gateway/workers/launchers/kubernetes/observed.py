"""The few fields that the gateway reads of the cluster's objects."""

from __future__ import annotations

from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from gateway.workers.launchers.kubernetes.names import EPOCH, WORKER_ID


class Seen(BaseModel):
    """A part of an object. Absent fields get defaults, unknown ones are ignored."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True)


class Metadata(Seen):
    name: str
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    deletion_timestamp: datetime | None = None
    deletion_grace_period_seconds: int | None = None


class Observed(Seen):
    metadata: Metadata

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def worker_id(self) -> str:
        """The object's worker, "" for a claim, which several may use."""
        return self.metadata.annotations.get(WORKER_ID, "")

    @property
    def epoch(self) -> int:
        """The epoch of the gateway that created it."""
        epoch = self.metadata.annotations.get(EPOCH, "")
        return int(epoch) if epoch.isdecimal() else 0

    @property
    def deleted(self) -> bool:
        return self.metadata.deletion_timestamp is not None


# --- ResourceClaim ------------------------------------------------------------------------------


class Consumer(Seen):
    name: str


class ClaimStatus(Seen):
    reserved_for: list[Consumer] = Field(default_factory=list)


class Claim(Observed):
    status: ClaimStatus = ClaimStatus()


# --- Event --------------------------------------------------------------------------------------


class Event(Seen):
    reason: str = ""
    message: str = ""
    last_timestamp: datetime | None = None
    event_time: datetime | None = None

    @property
    def at(self) -> datetime:
        return self.last_timestamp or self.event_time or datetime.min.replace(tzinfo=UTC)


# --- Pod ----------------------------------------------------------------------------------------


class PodClaim(Seen):
    name: str
    resource_claim_name: str = ""


class Resources(Seen):
    limits: dict[str, str] = Field(default_factory=dict)


class ContainerSpec(Seen):
    name: str
    resources: Resources = Resources()


class PodSpec(Seen):
    node_name: str = ""
    containers: list[ContainerSpec] = Field(default_factory=list)
    resource_claims: list[PodClaim] = Field(default_factory=list)


class Condition(Seen):
    type: str
    status: str
    reason: str = ""
    message: str = ""


class WaitingContainer(Seen):
    reason: str = ""
    message: str = ""


class Running(Seen):
    pass


class Terminated(Seen):
    exit_code: int = 0
    signal: int = 0
    reason: str = ""
    message: str = ""


class ContainerState(Seen):
    waiting: WaitingContainer | None = None
    running: Running | None = None
    terminated: Terminated | None = None


class Container(Seen):
    name: str
    image: str = ""
    state: ContainerState = ContainerState()


class PodStatus(Seen):
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    pod_ip: str = Field("", alias="podIP")
    conditions: list[Condition] = Field(default_factory=list)
    init_container_statuses: list[Container] = Field(default_factory=list)
    container_statuses: list[Container] = Field(default_factory=list)


class Pod(Observed):
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    def condition(self, kind: str) -> Condition | None:
        return next((each for each in self.status.conditions if each.type == kind), None)

    @property
    def claims(self) -> list[str]:
        names = (each.resource_claim_name for each in self.spec.resource_claims)
        return [name for name in names if name]

    @property
    def scheduled(self) -> bool:
        return bool(self.spec.node_name)
