"""The description of a trainer backend, without an import of its framework."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import BaseModel

from tandem.backends.jobs import JobConfiguration

Configuration = TypeVar("Configuration", bound=type[BaseModel])

_DESCRIPTION = "__tandem_backend__"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True)
class BackendDescription:
    """A trainer backend.

    A step backend computes operations in Tandem's trainer process. `implementation` is the import
    path of its `TrainerBackend`. A job backend trains a whole job with another framework. Its
    `configuration` is a `JobConfiguration`. Example: `BackendDescription(name="trl", kind="job",
    framework="trl", capabilities=("lora",), configuration=JobConfiguration)`."""

    name: str
    kind: Literal["step", "job"]
    framework: str
    capabilities: tuple[str, ...]
    configuration: type[BaseModel]
    implementation: str = ""

    @property
    def job_configuration(self) -> type[JobConfiguration]:
        """Raises `TypeError` for a step backend."""
        if not issubclass(self.configuration, JobConfiguration):
            raise TypeError(f"{self.name} is no job backend")
        return self.configuration


def register_backend(
    name: str, *, implementation: str = "", framework: str = "torch", capabilities: tuple[str, ...]
) -> Callable[[Configuration], Configuration]:
    """Describe the trainer backend whose configuration is the decorated class.

    A `JobConfiguration` describes a job backend, and names its framework itself. Another pydantic
    class describes a step backend with this `implementation`. The module must import neither torch
    nor the framework, because gateways and agents import it. Example:

        @register_backend("mine", implementation="my_package:MyBackend", capabilities=("sleep",))
        class MyConfiguration(TrainingSpec): ...

    An installed package names the module in the entry-point group `tandem.trainer_backends`, as
    `mine = "my_description"`."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a trainer backend: it has letters, digits, . _ -")

    def describe(configuration: Configuration) -> Configuration:
        own = configuration.framework if issubclass(configuration, JobConfiguration) else ""
        if bool(own) == bool(implementation):
            raise TypeError(
                f"the trainer backend {name!r}: a step backend needs `implementation`, and a "
                "JobConfiguration has none"
            )
        description = BackendDescription(
            name=name,
            kind="job" if own else "step",
            framework=own or framework,
            capabilities=capabilities,
            configuration=configuration,
            implementation=implementation,
        )
        setattr(configuration, _DESCRIPTION, description)
        return configuration

    return describe


def description_of(found: object) -> BackendDescription | None:
    """Return the description of a decorated class, or None. Subclasses do not inherit it."""
    described = vars(found).get(_DESCRIPTION) if isinstance(found, type) else None
    return described if isinstance(described, BackendDescription) else None
