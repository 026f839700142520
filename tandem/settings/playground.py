"""Settings of the playground. See `docs/blueprints.md`."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class PlaygroundSettings(BaseSettings):
    """Settings of the playground. Environment: `TANDEM_PLAYGROUND_*`."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_PLAYGROUND_")

    runs: int = Field(0, ge=0, le=1000, description="Trials that train at once (0: no playground).")
    minutes: float = Field(
        60.0, gt=0, le=1440, description="A trial ends after this time, with its weights."
    )
    tokens: int = Field(
        10_000_000, gt=0, le=2**53, description="A trial ends after this number of tokens."
    )
