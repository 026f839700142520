"""Settings of workers that are pods of a Kubernetes cluster, and of their shared claims.

Only the gateway reads them, with `TANDEM_LAUNCHER=kubernetes`. See `docs/deploy-kubernetes.md`."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tandem.settings.paths import OptionalPath
from tandem.settings.sharing import Sharing

_LABEL = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"
_SUBDOMAIN = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$"
_MOST_DEVICES = 32
"""Kubernetes' limit for one claim. It accepts more and never schedules them."""

Selector = Annotated[str, Field(min_length=1, max_length=10 * 2**10, pattern=r"\S")]
"""A CEL expression."""


class KubernetesSettings(BaseSettings):
    """Settings of workers that are pods. Environment: `TANDEM_KUBERNETES_*`."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_KUBERNETES_")

    namespace: str = Field(
        "",
        max_length=63,
        pattern=f"{_LABEL}|^$",
        description="The workers' namespace (default: the gateway's).",
    )
    instance: str = Field(
        "tandem",
        max_length=40,
        pattern=_LABEL,
        description="The gateway's Deployment, which owns all objects (service accounts: "
        "NAME-trainer, NAME-sampler).",
    )
    pod: str = Field(
        "",
        max_length=253,
        description="The gateway's own pod, which gets the Service's label while it leads.",
    )
    kubeconfig: OptionalPath = Field(
        None, description="A kubeconfig for a gateway outside the cluster."
    )
    placement: Literal["strict", "shared"] = Field(
        "strict",
        description="Trainers and samplers have separate nodes (`strict`) or share nodes "
        "(`shared`).",
    )
    templates: OptionalPath = Field(
        None,
        description="The folder of trainer-pod.yaml and sampler-pod.yaml (default: the package's).",
    )
    trainer_image: str = Field("", description="The image of trainers.")
    sampler_image: str = Field("", description="The image of samplers.")
    volume_claim: str = Field(
        "tandem-data",
        max_length=253,
        pattern=f"{_SUBDOMAIN}|^$",
        description="The PersistentVolumeClaim of the data directory (empty: the templates mount "
        "it).",
    )
    keep_compiled: bool = Field(
        False,
        description="Workers share compiled code, so an attacker in one can run code in all.",
    )
    cpus: float = Field(4.0, gt=0, description="The cores of each trainer rank and each sampler.")
    pending_timeout: float = Field(
        600.0,
        gt=0,
        description="A worker that is not scheduled within this time fails to start.",
    )
    node_lost: float = Field(
        60.0,
        ge=0,
        description="A worker on a node without contact for this time is given up.",
    )


class DeviceAlternative(BaseModel):
    """One of a claim's possible device choices."""

    model_config = ConfigDict(extra="forbid")

    device_class: str = Field(max_length=253, pattern=_SUBDOMAIN)
    selectors: list[Selector] = Field(default_factory=list, max_length=32)


class ClaimPoolSettings(BaseModel):
    """A pool of `TANDEM_CLAIM_POOLS`: device groups that are one ResourceClaim each.

    Example: `{"name": "train", "roles": ["trainer"], "claims": 4, "device_class": "gpu.nvidia.com",
    "devices": 8}` makes the groups `train-0` to `train-3`, of 8 GPUs each."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=40, pattern=_LABEL)
    roles: list[Literal["trainer", "sampler"]] = Field(min_length=1)
    claims: int = Field(1, ge=1, le=1000, description="The largest number of claims.")
    device_class: str = Field(
        "",
        max_length=253,
        pattern=f"{_SUBDOMAIN}|^$",
        description="The DeviceClass (empty, without alternatives: no claims, and workers "
        "use the CPU).",
    )
    selectors: list[Selector] = Field(default_factory=list, max_length=32)
    devices: int = Field(
        1,
        ge=1,
        le=_MOST_DEVICES,
        description="Devices of each node, or ranks if workers use the CPU.",
    )
    compute: Literal["gpu", "cpu"] = Field(
        "gpu",
        description="The kind of devices: NVIDIA devices (`gpu`), or others such as cores, "
        "beside which workers compute on the CPU (`cpu`).",
    )
    nodes: int = Field(
        1, ge=1, le=64, description="Pods of a trainer, each with a claim of its own."
    )
    alternatives: list[DeviceAlternative] | None = Field(
        None,
        min_length=1,
        max_length=8,
        description="Classes in order of preference, instead of device_class and selectors.",
    )
    sharing: Sharing | None = Field(
        None,
        description="How workers share a claim (empty: `time_slice`, without a configuration of "
        "the claim).",
    )
    awake: int = Field(
        1, ge=0, description="Workers of a claim that are awake at once (0: all, always)."
    )
    workers: int = Field(
        16, ge=1, le=256, description="Workers that may share a claim, awake or asleep."
    )
    memory_bytes: int = Field(0, ge=0, description="The memory of a device (0: no bound).")
    node_memory_bytes: int = Field(
        0,
        ge=0,
        description="The host memory that the workers of a claim may request together on "
        "each node (0: no bound).",
    )
    idle: float = Field(300.0, ge=0, description="Seconds until an unused claim is deleted.")

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
        if not self.has_claims and self.selectors:
            raise ValueError(
                f"pool {self.name!r} has no device_class, so that it makes no claim that could "
                "have selectors"
            )
        if self.sharing == Sharing.MPS and not (self.has_gpus and self.memory_bytes):
            raise ValueError(
                f"pool {self.name!r} shares devices by mps, so it needs claims of GPUs "
                "(device_class, compute) and the memory of a device (memory_bytes)"
            )
        return self
