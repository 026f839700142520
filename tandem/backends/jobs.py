"""The configuration of a job backend: one validated object that becomes a command.

All methods are pure. Two calls with equal arguments return equal values, so the same configuration
runs on a host, in a pod and as a Kubeflow `TrainJob`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field


class JobPaths(BaseModel):
    """Places where a job runs. Each is an absolute path on that machine.

    `python` is the interpreter of the framework's environment. `program` is the folder of the
    backend's own program. `folder` is the job's, `model` that of its base model. Example:
    `JobPaths(python="/opt/trl/bin/python", program="/opt/tandem/trainer_service/jobs/trl",
    folder="/data/jobs/s-ab12_train_0", model="/data/models/tiny")`."""

    model_config = ConfigDict(frozen=True)

    python: str
    program: str
    folder: str
    model: str


class JobResources(BaseModel):
    """The machine's offer to a job: `processes` on each of `nodes`, and the `device` of each
    process. `device_bytes` is that device's memory, 0 if unknown."""

    model_config = ConfigDict(frozen=True)

    processes: int = Field(1, ge=1, le=1024)
    nodes: int = Field(1, ge=1, le=256)
    device: str = "cpu"
    device_bytes: int = Field(0, ge=0)


class JobEnd(BaseModel):
    """The content of `attempt-N/end.json`.

    `status` is that of torchrun, 0 after success, and `STOPPED` after a requested end. `reason` is
    one sentence without paths. `at` is in seconds since 1970."""

    model_config = ConfigDict(frozen=True)

    status: int
    reason: str = ""
    at: float = 0.0


STOPPED = 143
"""The status of an attempt that was asked to end by SIGTERM."""


class JobConfiguration(BaseModel, ABC):
    """A job backend's settings. Subclasses add fields with types and bounds.

    A field that the class does not know is an error. `framework` names the environment. Its
    `packages` are checked before a job starts. Each version must begin with the given numbers, so
    "1.16" accepts 1.16.2, and "" accepts any version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    framework: ClassVar[str]
    packages: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def validate_resources(self, resources: JobResources) -> None:
        """Raise `InvalidField` for a setting that these resources cannot serve."""

    @abstractmethod
    def command(self, paths: JobPaths) -> tuple[str, ...]:
        """Return the launcher of the ranks, torchrun, without its program. No shell reads it."""

    @abstractmethod
    def args(self, paths: JobPaths) -> tuple[str, ...]:
        """Return the program and its arguments, which follow `command`."""

    @abstractmethod
    def environment(self, paths: JobPaths) -> dict[str, str]:
        """Return variables of the framework. The runner adds `PET_*` and chosen devices."""

    @abstractmethod
    def outputs(self, paths: JobPaths) -> tuple[str, ...]:
        """Return the files that a finished job must have written."""
