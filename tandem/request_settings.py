"""The settings of what clients may ask for at once, and for how long; see `docs/limits.md`."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

MOST_PAYLOAD_BYTES = 2**30
"""The largest payload of an operation that a gateway may be set to accept."""


class LimitSettings(BaseSettings):
    """What an owner, and all owners together, may hold at once. Environment: `TANDEM_LIMIT_*`.

    The number at the end is the status of a request beyond the limit; see `docs/limits.md`.
    """

    model_config = SettingsConfigDict(env_prefix="TANDEM_LIMIT_")

    sessions: int = Field(2000, ge=1, description="Active sessions of an owner; 403.")
    runs: int = Field(128, ge=1, description="Training runs of an owner that have not ended; 403.")
    samplers: int = Field(128, ge=1, description="Sampler engines of an owner; 403.")
    sampling_sessions: int = Field(
        10_000, ge=1, description="Active sampling sessions of an owner; 403."
    )
    custom_losses: int = Field(
        1024, ge=1, description="Custom losses in an owner's active sessions; 403."
    )
    checkpoint_bytes: int = Field(
        2**40, ge=0, description="All checkpoints of an owner, the new one included; 403."
    )
    unnamed_bytes: int = Field(
        16 * 2**30,
        ge=0,
        description="Weights without a name of an owner on disk; beyond it, those older than the "
        "sampler_newest_kept newest of their run go before sampler_superseded_ttl is over.",
    )
    queued_operations: int = Field(
        16_384, ge=1, description="Unfinished operations of an owner; 429."
    )
    queued_operations_in_all: int = Field(65_536, ge=1, description="The same of all owners; 429.")
    queued_bytes: int = Field(
        2 * 2**30, ge=1, description="Payloads on disk of an owner's queued operations; 429."
    )
    queued_bytes_in_all: int = Field(8 * 2**30, ge=1, description="The same of all owners; 429.")
    waiting_samples: int = Field(16_384, ge=1, description="Unfinished samples of an owner; 429.")
    waiting_samples_in_all: int = Field(32_768, ge=1, description="The same of all owners; 429.")
    held_bytes: int = Field(
        256 * 2**20, ge=1, description="Queued requests of an owner in memory; 429."
    )
    held_bytes_in_all: int = Field(2**30, ge=1, description="The same of all owners; 429.")
    body_bytes: int = Field(
        256 * 2**20, ge=1, description="Request bodies of an owner being received; 429."
    )
    body_bytes_in_all: int = Field(2**30, ge=1, description="The same of all owners; 429.")
    requests: int = Field(8192, ge=1, description="Open requests of an owner; 429.")
    result_bytes: int = Field(
        64 * 2**20, ge=0, description="Results of an owner in memory; older ones move to disk."
    )
    results: int = Field(
        65_536,
        ge=1,
        description="Unfetched sample results of an owner; the oldest are dropped.",
    )


class OpenAISettings(BaseSettings):
    """The OpenAI-compatible routes under /v1. Environment: `TANDEM_OPENAI_*`."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_OPENAI_")

    idle_ttl: float = Field(
        900.0, gt=0, description="An owner's engines for /v1 stop when unused for this long."
    )
    start_timeout: float = Field(
        240.0, gt=0, description="Longest wait for an engine to start; then 503."
    )
    request_timeout: float = Field(
        1800.0, gt=0, description="Longest duration of a request; then 504."
    )
    max_choices: int = Field(1024, ge=1, description="Prompts times choices of one request; 400.")


class HttpSettings(BaseSettings):
    """Connections and the deadlines of a request's parts. Environment: `TANDEM_HTTP_*`."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_HTTP_")

    max_connections: int = Field(8192, ge=1, description="Open connections; further ones get 429.")
    max_header_bytes: int = Field(
        64 * 2**10, ge=1024, description="Size of request line and headers; 431."
    )
    header_timeout: float = Field(
        20.0, gt=0, description="Deadline for the headers of a request; 408."
    )
    body_gap_timeout: float = Field(30.0, gt=0, description="Longest pause within a body; 408.")
    body_timeout: float = Field(300.0, gt=0, description="Deadline for a whole body; 408.")
    keep_alive: int = Field(75, ge=1, description="Idle connections are closed after this long.")
    write_timeout: float = Field(
        60.0,
        gt=0,
        description="A client that reads nothing of its answer for this long is disconnected.",
    )
    linger: float = Field(
        10.0,
        gt=0,
        description="How long the rest of a refused body is discarded before the connection is "
        "closed, so that the client can read the answer.",
    )
