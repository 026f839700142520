"""Limits of clients' requests. See `docs/operations.md`."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

MOST_PAYLOAD_BYTES = 2**28
"""The largest payload of an operation that a gateway can be set to accept."""


class LimitSettings(BaseSettings):
    """Limits of an owner. Environment: `TANDEM_LIMIT_*`. See `docs/operations.md`.

    The largest values of `queued_operations` and `waiting_samples` are the bounds of all owners
    together."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_LIMIT_")

    sessions: int = Field(2000, ge=1, description="An owner's active sessions.")
    runs: int = Field(128, ge=1, description="An owner's runs that have not ended.")
    samplers: int = Field(128, ge=1, description="An owner's samplers.")
    checkpoint_bytes: int = Field(2**40, ge=0, description="An owner's checkpoints.")
    unnamed_bytes: int = Field(
        16 * 2**30,
        ge=0,
        description="An owner's weights without a name.",
    )
    queued_operations: int = Field(
        16_384, ge=1, le=65_536, description="An owner's unfinished operations."
    )
    waiting_samples: int = Field(
        16_384, ge=1, le=32_768, description="An owner's unfinished samples."
    )
