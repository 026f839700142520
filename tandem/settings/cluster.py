"""The settings of workers that are pods of a Kubernetes cluster, and of the claims that they share.

Only the gateway reads them, with `TANDEM_LAUNCHER=kubernetes`; see `docs/deploy-kubernetes.md`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

_LABEL = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"
_SUBDOMAIN = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$"
_MOST_DEVICES = 32
"""That Kubernetes allocates to one claim; more is accepted, and never scheduled."""
_MOST_PARAMETER_BYTES = 10 * 2**10

Selector = Annotated[str, Field(min_length=1, max_length=10 * 2**10, pattern=r"\S")]
"""A CEL expression."""


class KubernetesSettings(BaseSettings):
    """Settings of workers that are pods. Environment: `TANDEM_KUBERNETES_*`."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_KUBERNETES_")

    namespace: str = Field(
        "",
        max_length=63,
        pattern=f"{_LABEL}|^$",
        description="The namespace of the workers' objects; without it, the gateway's own.",
    )
    instance: str = Field(
        "tandem",
        max_length=40,
        pattern=_LABEL,
        description="The name of the gateway's Deployment, which owns all objects and names the "
        "workers' service accounts NAME-trainer and NAME-sampler.",
    )
    pod: str = Field(
        "",
        max_length=253,
        description="The gateway's own pod, which gets the label of its Service while it serves.",
    )
    kubeconfig: Path | None = Field(
        None, description="A kubeconfig for a gateway outside the cluster."
    )
    placement: Literal["strict", "shared"] = Field(
        "strict",
        description="Whether trainers and samplers have nodes of their own (`strict`) or the "
        "same nodes (`shared`).",
    )
    templates: Path | None = Field(
        None,
        description="The folder of trainer-pod.yaml and sampler-pod.yaml; without one of them, "
        "that of the package.",
    )
    trainer_image: str = Field("", description="The image of trainers.")
    sampler_image: str = Field("", description="The image of samplers.")
    volume_claim: str = Field(
        "tandem-data",
        max_length=253,
        pattern=f"{_SUBDOMAIN}|^$",
        description="The PersistentVolumeClaim with the data directory, which workers mount; "
        "empty: the templates have it.",
    )
    keep_compiled: bool = Field(
        False,
        description="Whether workers share compiled code on the volume; an attacker in one of "
        "them could then run code in all.",
    )
    cpus: float = Field(
        4.0, gt=0, description="The cores that each rank of a trainer, and each sampler, requests."
    )
    pending_timeout: float = Field(
        600.0,
        gt=0,
        description="A worker that is not scheduled within this many seconds fails to start.",
    )
    node_lost: float = Field(
        60.0,
        ge=0,
        description="A worker whose node was not reached for this many seconds is given up.",
    )


class _DeviceChoice(BaseModel):
    """Which devices a claim asks for."""

    model_config = ConfigDict(extra="forbid")

    device_class: str = Field(max_length=253, pattern=f"{_SUBDOMAIN}|^$")
    selectors: list[Selector] = Field(default_factory=list, max_length=32)


class DeviceAlternative(_DeviceChoice):
    """One of the devices that a claim may be given."""

    device_class: str = Field(max_length=253, pattern=_SUBDOMAIN)


class DeviceSharing(BaseModel):
    """What a device's driver is told of how those who use one device share it.

    Literal example: `{"driver": "gpu.nvidia.com", "parameters": {"apiVersion":
    "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": {"strategy": "TimeSlicing",
    "timeSlicingConfig": {"interval": "Long"}}}}`.
    """

    model_config = ConfigDict(extra="forbid")

    driver: str = Field(max_length=63, pattern=_SUBDOMAIN)
    parameters: dict[str, JsonValue] = Field(min_length=1)

    @field_validator("parameters")
    @classmethod
    def _is_small(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if (size := len(json.dumps(value))) > _MOST_PARAMETER_BYTES:
            raise ValueError(f"it has {size} bytes; Kubernetes takes {_MOST_PARAMETER_BYTES}")
        return value


class ClaimPoolSettings(_DeviceChoice):
    """A pool of `TANDEM_CLAIM_POOLS`: device groups of which each is a ResourceClaim.

    Literal example: `{"name": "train", "roles": ["trainer"], "claims": 4, "device_class":
    "gpu.nvidia.com", "devices": 8}` is the groups `train-0` to `train-3`, of 8 GPUs each.
    """

    name: str = Field(max_length=40, pattern=_LABEL)
    roles: list[Literal["trainer", "sampler"]] = Field(min_length=1)
    claims: int = Field(1, ge=1, le=1000, description="How many claims at most.")
    device_class: str = Field(
        "",
        max_length=253,
        pattern=f"{_SUBDOMAIN}|^$",
        description="The DeviceClass; empty, and no alternatives: no claims, workers use the CPU.",
    )
    devices: int = Field(
        1,
        ge=1,
        le=_MOST_DEVICES,
        description="Of each node: devices, or, where workers use the CPU, ranks.",
    )
    compute: Literal["gpu", "cpu"] = Field(
        "gpu",
        description="What the devices of a claim are: NVIDIA devices, or something else, such as "
        "the cores of a driver for CPUs, beside which workers compute on the CPU.",
    )
    nodes: int = Field(
        1, ge=1, le=64, description="Pods of a trainer, each with a claim of its own."
    )
    alternatives: list[DeviceAlternative] | None = Field(
        None,
        min_length=1,
        max_length=8,
        description="Instead of device_class and selectors: the first that there is.",
    )
    sharing: DeviceSharing | None = None
    awake: int = Field(1, ge=0, description="Workers of a claim awake at once; 0: all, always.")
    workers: int = Field(
        16, ge=1, le=256, description="Workers that may share a claim, awake or asleep."
    )
    memory_bytes: int = Field(0, ge=0, description="Of each device; 0: not bounded.")
    node_memory_bytes: int = Field(
        0,
        ge=0,
        description="What the workers of a claim may request of each of its nodes together, so "
        "that no pod waits for memory that others on the claim hold; 0: not bounded.",
    )
    idle: float = Field(
        300.0, ge=0, description="Seconds for which a claim is kept that nobody uses."
    )

    @property
    def has_claims(self) -> bool:
        return bool(self.device_class or self.alternatives)

    @property
    def has_gpus(self) -> bool:
        return self.has_claims and self.compute == "gpu"

    @field_validator("name")
    @classmethod
    def _is_no_group(cls, value: str) -> str:
        if re.search(r"-\d+$", value):
            raise ValueError("it must not end like that of a claim, NAME-0")
        return value

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.nodes > 1 and self.roles != ["trainer"]:
            raise ValueError(
                f"pool {self.name!r} has {self.nodes} nodes; only a pool for trainers alone may "
                "have several, for a sampler is one pod"
            )
        if self.alternatives and (self.device_class or self.selectors):
            raise ValueError(
                f"pool {self.name!r} has alternatives; device_class and selectors are said in each"
            )
        if not self.has_claims and (self.selectors or self.sharing):
            raise ValueError(
                f"pool {self.name!r} has no device_class, so that it makes no claim that could "
                "have selectors or sharing"
            )
        return self
