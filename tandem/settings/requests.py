"""Limits of clients' requests. See `docs/operations.md`."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

MOST_PAYLOAD_BYTES = 2**28
"""The largest payload of an operation that a gateway can be set to accept."""


class LimitSettings(BaseSettings):
    """Limits of an owner. Environment: `TANDEM_LIMIT_*`. See `docs/operations.md`.

    The number in a description is the HTTP status of a request beyond the limit. The largest
    values of `queued_operations` and `waiting_samples` are the bounds of all owners together."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_LIMIT_")

    sessions: int = Field(2000, ge=1, description="Active sessions of an owner (403 beyond).")
    runs: int = Field(
        128, ge=1, description="Training runs of an owner that have not ended (403 beyond)."
    )
    samplers: int = Field(128, ge=1, description="Samplers of an owner (403 beyond).")
    checkpoint_bytes: int = Field(
        2**40, ge=0, description="Bytes of an owner's checkpoints (403 beyond)."
    )
    unnamed_bytes: int = Field(
        16 * 2**30,
        ge=0,
        description="Bytes of an owner's weights without a name (older ones are removed beyond).",
    )
    queued_operations: int = Field(
        16_384, ge=1, le=65_536, description="Unfinished operations of an owner (429 beyond)."
    )
    waiting_samples: int = Field(
        16_384, ge=1, le=32_768, description="Unfinished samples of an owner (429 beyond)."
    )
