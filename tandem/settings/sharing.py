"""Settings of device groups, and of workers that share devices. See `docs/sharing.md`."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from tandem.settings.chosen_names import GROUP_PATTERN

Share = Literal["when_full", "always", "never"]
MOST_RUNS = 8
"""The largest number of runs of one trainer."""


class Sharing(StrEnum):
    """How the workers of several runs share the devices of a group."""

    EXCLUSIVE = "exclusive"
    TIME_SLICE = "time_slice"
    MPS = "mps"

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]

    def strategy(self, *, memory_bytes: int) -> dict[str, Any] | None:
        """Return the `sharing` of a claim's `GpuConfig` (`resource.nvidia.com/v1beta1`), or None
        for a claim without configuration. A device has `memory_bytes`."""
        if self == Sharing.TIME_SLICE:
            return {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Default"}}
        if self == Sharing.MPS:
            limits = {"defaultPinnedDeviceMemoryLimit": str(memory_bytes)}
            return {"strategy": "MPS", "mpsConfig": limits}
        return None


_MEANINGS = {
    Sharing.EXCLUSIVE: "A group has the trainer and engines of one run, and no other worker has a "
    "place there.",
    Sharing.TIME_SLICE: "Several runs have places on the group, and their workers take turns.",
    Sharing.MPS: "All workers of the group are awake side by side, as clients of NVIDIA's MPS "
    "daemon.",
}


class SharingSettings(BaseSettings):
    """Settings of workers that share a group's devices. Environment: `TANDEM_SHARING_*`."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_SHARING_")

    policy: Literal["deferred", "eager", "idle_after"] = Field(
        "deferred",
        description="When a worker without waiters sleeps: never (`deferred`), once idle "
        "(`eager`), or some time later (`idle_after`).",
    )
    idle_after: float = Field(60.0, ge=0, description="The time of the policy `idle_after`.")
    quantum: float = Field(
        5.0,
        ge=0,
        description="A busy worker keeps its devices for this time at least although others wait.",
    )
    max_wait: float = Field(
        120.0,
        gt=0,
        description="A worker that has waited for this time is next, even if the holder is busy.",
    )
    weights: dict[str, float] = Field(
        default_factory=dict,
        description='The weights of owners that share devices, as {"OWNER": 2.0} (default 1).',
    )
    switch_timeout: float = Field(
        120.0,
        gt=0,
        description="A worker that takes longer to sleep or to wake is killed.",
    )
    lora_runs: Share = Field(
        "when_full",
        description="When LoRA runs of one base model share a trainer and an engine, unless a run "
        "chooses.",
    )
    across_owners: bool = Field(
        False,
        description="Runs and sampling sessions of several owners may share a trainer and an "
        "engine.",
    )


class GroupSettings(BaseModel):
    """A device group of `TANDEM_GROUPS`. See `docs/sharing.md`."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=GROUP_PATTERN)
    devices: list[str] = Field(min_length=1, description="`cpu:0-3`, `cuda:0`, `cuda:GPU-…`")
    roles: list[Literal["trainer", "sampler"]] = Field(min_length=1)
    sharing: Sharing = Sharing.TIME_SLICE
    awake: int = Field(1, ge=0, description="Workers awake at once (0: all, always).")
    workers: int = Field(16, ge=1, description="Workers that may be there, awake or asleep.")
    memory_bytes: int = Field(
        0,
        ge=0,
        description="The memory of a device (0: an NVIDIA device's own, no bound for cores).",
    )
