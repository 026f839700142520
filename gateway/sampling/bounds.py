"""Bounds on the age of the weights that may answer a sample."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import InvalidRequest, StaleVersion
from tandem.v1 import common_pb2
from tandem.weights import version_number


@dataclass(frozen=True)
class Bounds:
    """`min_version` is the least number of the run's version, 3 for `RUN/v000003-9f2c41d0`.
    `max_staleness` is in optimizer steps behind the run's trainer. None bounds nothing."""

    min_version: int | None = None
    max_staleness: int | None = None

    def check(self, version: common_pb2.WeightVersion, *, trainer_step: int | None) -> None:
        """Raise `StaleVersion` if the version may not answer, and `InvalidRequest` if it has no
        number or no trainer. `trainer_step` is None without a trainer."""
        if self == Bounds():
            return
        if not version.run_id:
            raise InvalidRequest(
                "min_version and max_staleness bound a run's weights, and a base model has one "
                "version; leave them out, or sample from a run's weights"
            )
        number = version_number(version.name)
        if self.min_version is not None and number < self.min_version:
            raise StaleVersion(
                f"version {number} of {version.run_id} would answer, and min_version is "
                f"{self.min_version}; save newer weights for sampling, or lower min_version"
            )
        if self.max_staleness is None:
            return
        if trainer_step is None:
            raise InvalidRequest(
                f"max_staleness counts steps behind the trainer of {version.run_id}, and that run "
                "has ended; leave it out, or bound min_version"
            )
        behind = trainer_step - version.step
        if behind > self.max_staleness:
            raise StaleVersion(
                f"version {number} of {version.run_id} is {behind} steps behind its trainer, and "
                f"max_staleness is {self.max_staleness}; save newer weights for sampling, or raise "
                "max_staleness"
            )
