"""Settings of the whole platform. Durations are in seconds, sizes in bytes.

`tandem config` prints the resolved values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from tandem.settings.cluster import ClaimPoolSettings, KubernetesSettings
from tandem.settings.oidc import OidcSettings
from tandem.settings.paths import OptionalPath
from tandem.settings.playground import PlaygroundSettings
from tandem.settings.requests import MOST_PAYLOAD_BYTES, LimitSettings
from tandem.settings.sharing import GroupSettings, SharingSettings
from tandem.settings.workers import PoolSettings, SamplerEnvironment, TrainerEnvironment


def without_password(url: str) -> str:
    """Return a database's URL without user and parameters, which may hold the password."""
    address = url.partition("?")[0]
    scheme, _, place = address.partition("://")
    return f"{scheme}://…@{place.rpartition('@')[2]}" if "@" in place else address


class GatewaySettings(BaseSettings):
    """Settings of the gateway. Environment: `TANDEM_*`."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_")

    @property
    def private(self) -> Path:
        return self.private_dir or self.data_dir

    host: str = Field("127.0.0.1", description="The gateway's address.")
    port: int = Field(
        8000,
        ge=0,
        le=65535,
        description="The gateway's port (0: any free port).",
    )
    public_url: str = Field(
        "",
        description="The URL for clients (default: the request's host).",
    )
    data_dir: Annotated[Path, BeforeValidator(lambda given: given or ".tandem")] = Field(
        Path(".tandem"), description="The data directory."
    )
    private_dir: OptionalPath = Field(
        None,
        description="Keys, requests and results, which workers must not read (default: the data "
        "directory).",
    )
    database_url: str = Field(
        "",
        description="PostgreSQL, as postgresql://USER:PASSWORD@HOST/NAME (default: SQLite in the "
        "data directory).",
        repr=False,
    )
    database_url_file: OptionalPath = Field(None, description="A file with the database's URL.")
    leader_timeout: float = Field(
        5.0,
        gt=0,
        description="A standby takes over from a leader that was silent for this time.",
    )
    api_key: str = Field(
        "",
        description="The local admin key (default: made at the first start).",
        repr=False,
        exclude=True,
    )
    bootstrap_key_file: OptionalPath = Field(
        None,
        description="A file with the first admin key, such as a mounted Secret.",
    )
    oidc: Annotated[OidcSettings | None, BeforeValidator(lambda given: given or None)] = Field(
        None,
        description="Sign-in to the page at a provider of OpenID Connect, as JSON "
        "([security.md](security.md#sign-in-at-a-provider)).",
    )
    models: dict[str, Path] = Field(
        default_factory=dict,
        description='Base models to register at the start, as {"NAME": "/PATH"}.',
    )
    models_dir: OptionalPath = Field(
        None,
        description="Downloaded base models (default: `models` in the data directory).",
    )
    groups: list[GroupSettings] = Field(
        default_factory=list,
        description="The device groups, as JSON (default: groups of the devices found).",
    )
    claim_pools: list[ClaimPoolSettings] = Field(
        default_factory=list,
        description="Pools of ResourceClaims for pods, as JSON.",
    )
    host_memory_bytes: int = Field(
        0,
        ge=0,
        description="Host memory of all workers together (0: nine tenths).",
    )
    spill_dir: OptionalPath = Field(
        None,
        description="State of sleeping trainers when host memory is full (default: `spill` in the "
        "data directory).",
    )
    model_defaults: dict[str, dict[str, str | int | float]] = Field(
        default_factory=dict,
        description='Defaults for the runs of a model, as {"NAME": {"ranks": 2}}.',
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The lowest level in the logs."
    )
    recovery_enabled: bool = Field(True, description="Restore a trainer that dies.")
    recovery_share: float = Field(
        0.02, gt=0, le=1, description="The share of time that snapshots may take."
    )
    session_ttl: float = Field(
        60.0, gt=0, description="A session without a heartbeat ends after this time."
    )
    result_ttl: float = Field(
        3600.0, gt=0, description="An unfetched result is removed after this time."
    )
    agents: dict[Literal["trainer", "sampler"], str] = Field(
        default_factory=dict,
        description='Remote agents, as {"trainer": "HOST:PORT", "sampler": "HOST:PORT"} (default: '
        "the local agent).",
    )
    tls_dir: OptionalPath = Field(
        None,
        description="The certificate authority of `tandem tls create`, for remote workers.",
    )
    launcher: str = Field(
        "agent",
        description="Workers are processes (`agent`) or pods (`kubernetes`).",
    )
    stop_timeout: float = Field(
        30.0,
        ge=0,
        description="A stopping gateway saves runs for at most this time (0: it saves none).",
    )
    worker_start_timeout: float = Field(
        300.0,
        gt=0,
        description="A worker has this time to get its address, and again to serve.",
    )
    worker_unresponsive_timeout: float = Field(
        300.0,
        gt=0,
        description="A worker that does not answer for this time is killed.",
    )
    operation_timeout: float = Field(
        1800.0,
        gt=0,
        description="An operation or a sample fails after this time at a worker.",
    )
    compress_payloads: bool = Field(
        False,
        description="Ask clients to compress batches, for slow networks.",
    )
    max_payload_bytes: int = Field(
        64 * 2**20,
        ge=1,
        le=MOST_PAYLOAD_BYTES,
        description="A larger request body is refused with 413.",
    )
    openai_idle_ttl: float = Field(
        900.0,
        gt=0,
        description="Engines for /v1 without a request end after this time.",
    )
    sampler_idle_ttl: float = Field(
        3600.0,
        gt=0,
        description="Unnamed weights without a sample are removed after this time.",
    )
    history_ttl: float = Field(
        30 * 86_400.0,
        gt=0,
        description="Ended sessions, runs and operations are forgotten after this time.",
    )
    min_free_bytes: int = Field(
        64 * 2**20, ge=0, description="Weights are not published with less free disk space."
    )
    weights_handoff: Literal["auto", "on", "off"] = Field(
        "auto",
        description="An engine reads new weights from the memory of a trainer on its device (auto: "
        "on a GPU).",
    )

    trainer: TrainerEnvironment = Field(default_factory=TrainerEnvironment)
    sharing: SharingSettings = Field(default_factory=SharingSettings)
    pool: PoolSettings = Field(default_factory=PoolSettings)
    kubernetes: KubernetesSettings = Field(default_factory=KubernetesSettings)
    sampler: SamplerEnvironment = Field(default_factory=SamplerEnvironment)
    limit: LimitSettings = Field(default_factory=LimitSettings)
    playground: PlaygroundSettings = Field(default_factory=PlaygroundSettings)

    @model_validator(mode="after")
    def _read_database_url(self) -> Self:
        if (path := self.database_url_file) is None:
            return self
        if self.database_url:
            raise ValueError(
                "TANDEM_DATABASE_URL and TANDEM_DATABASE_URL_FILE are both set; set one of them"
            )
        try:
            self.database_url = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ValueError(f"TANDEM_DATABASE_URL_FILE ({path}) cannot be read: {why}") from error
        if not self.database_url:
            raise ValueError(f"TANDEM_DATABASE_URL_FILE ({path}) is empty")
        return self


def settings_fault(error: ValidationError | SettingsError) -> str:
    """Return the fault of the settings, such as `TANDEM_PORT is 'abc': Input should be a valid
    integer, unable to parse string as an integer`."""
    if isinstance(error, SettingsError):  # a list or object that cannot be parsed
        field = re.search(r'"(\w+)"', str(error))
        return f"TANDEM_{field[1].upper()} is not JSON" if field else str(error)
    prefix = _prefix_of(error.title)

    def named(where: tuple[int | str, ...], given: object) -> str:
        return f"{prefix}{'_'.join(map(str, where)).upper()}{_shown(given)}: " if where else ""

    return "; ".join(
        f"{named(each['loc'], each['input'])}{each['msg'].removeprefix('Value error, ')}"
        for each in error.errors(include_url=False, include_context=False)
    )


def _shown(value: object) -> str:
    return "" if isinstance(value, (dict, list)) else f" is {str(value)[:80]!r}"


def _prefix_of(name: str) -> str:
    found = (kind for kind in BaseSettings.__subclasses__() if kind.__name__ == name)
    kind = next(found, GatewaySettings)
    return str(kind.model_config.get("env_prefix", ""))
