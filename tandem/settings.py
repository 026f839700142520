"""The settings of the whole platform, from the environment (`TANDEM_*`) or the command line.

`tandem config` prints the resolved values. Durations are in seconds, sizes in bytes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from tandem.cluster_settings import ClaimPoolSettings, KubernetesSettings
from tandem.request_settings import MOST_PAYLOAD_BYTES, LimitSettings
from tandem.sharing_settings import GroupSettings, SharingSettings
from tandem.worker_settings import PoolSettings, SamplerEnvironment, TrainerEnvironment

OptionalFile = Annotated[Path | None, BeforeValidator(lambda given: given or None)]
"""A file that a setting names; an empty variable names none."""


def without_password(url: str) -> str:
    """Return a database's URL without its user, and without its parameters: either may have the
    password."""
    address = url.partition("?")[0]
    scheme, _, place = address.partition("://")
    return f"{scheme}://…@{place.rpartition('@')[2]}" if "@" in place else address


class GatewaySettings(BaseSettings):
    """Settings of the gateway. Environment: `TANDEM_*`."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_")

    @property
    def private(self) -> Path:
        return self.private_dir or self.data_dir

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="0 = any free port.")
    public_url: str = Field(
        "",
        description="The base of the addresses that the gateway hands out; empty: the one that "
        "the request came to.",
    )
    data_dir: Path = Path(".tandem")
    private_dir: Path | None = Field(
        None,
        description="Where the gateway keeps what its workers are not to read: its keys, and "
        "requests and results of clients; by default data_dir.",
    )
    database_url: str = Field(
        "",
        description="postgresql://USER:PASSWORD@HOST/NAME; empty: SQLite under data_dir.",
        repr=False,
    )
    database_url_file: OptionalFile = Field(
        None, description="The file that has the URL, such as a mounted Secret."
    )
    lease_ttl: float = Field(
        5.0,
        gt=0,
        description="With PostgreSQL, another gateway takes over when this one has not been heard "
        "of for this long.",
    )
    api_key: str = Field(
        "", description="Empty: generated, kept in data_dir.", repr=False, exclude=True
    )
    bootstrap_key_file: OptionalFile = Field(
        None,
        description="The file with the first admin key, such as a mounted Secret.",
    )
    models: dict[str, Path] = Field(
        default_factory=dict,
        description='Base models to register at the start, as JSON: {"NAME": "/PATH"}.',
    )
    models_dir: Path | None = Field(
        None,
        description="Where `tandem models add` puts what it downloads, and the gateway finds it; "
        "by default models below data_dir.",
    )
    groups: list[GroupSettings] = Field(
        default_factory=list,
        description="Device groups, as JSON, see `docs/sharing.md`; empty: what the host has.",
    )
    claim_pools: list[ClaimPoolSettings] = Field(
        default_factory=list,
        description="Pools of claims, whose groups pods share, as JSON, see `docs/cluster.md`.",
    )
    host_memory_bytes: int = Field(
        0,
        ge=0,
        description="What all workers together may have of the host's memory; 0: nine tenths of "
        "it. Not for pods, each of which has its own.",
    )
    spill_dir: Path | None = Field(
        None,
        description="Where trainers that sleep write their state when the host's memory is full; "
        "by default below data_dir.",
    )
    model_defaults: dict[str, dict[str, str | int | float]] = Field(
        default_factory=dict,
        description='What runs of a model ask for by default, as JSON: {"NAME": {"ranks": 2}}.',
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    recovery_enabled: bool = Field(
        True, description="Restore a trainer that dies. Otherwise its run ends."
    )
    recovery_share: float = Field(
        0.02, gt=0, le=1, description="The share of the training time that snapshots may take."
    )
    session_ttl: float = Field(60.0, gt=0, description="Sessions without heartbeats end.")
    result_ttl: float = Field(3600.0, gt=0, description="Unfetched results are kept for this long.")
    agents: dict[Literal["trainer", "sampler"], str] = Field(
        default_factory=dict,
        description="Agents of other hosts, or containers, that start trainers and samplers, as "
        'JSON: {"trainer": "HOST:PORT", "sampler": "HOST:PORT"}; needs tls_dir. Empty: that of '
        "data_dir.",
    )
    tls_dir: Path | None = Field(
        None,
        description="The certificate authority of `tandem tls create`, for workers beyond this "
        "machine.",
    )
    launcher: str = Field(
        "agent",
        description="What starts workers; agent: the `tandem agent` of the data directory; "
        "kubernetes: the API server of a cluster, as pods.",
    )
    stop_timeout: float = Field(
        30.0,
        ge=0,
        description="A gateway that stops its workers lets them end what they are at, and saves "
        "the runs first, for so long at most; 0: not at all.",
    )
    worker_start_timeout: float = Field(300.0, gt=0)
    worker_unresponsive_timeout: float = Field(
        300.0,
        gt=0,
        description="A worker that was unresponsive for this long is killed; by `tandem up` also a "
        "gateway or an agent.",
    )
    operation_timeout: float = Field(
        1800.0,
        gt=0,
        description="Seconds for an operation of a trainer, or for a sample, from its begin.",
    )
    compress_payloads: bool = Field(
        False, description="Ask clients to compress their batches (zstd)."
    )
    max_payload_bytes: int = Field(
        64 * 2**20,
        ge=1,
        le=MOST_PAYLOAD_BYTES,
        description="Body of one request, decompressed; 413. Of JSON less: see limits.md.",
    )
    max_engines: int = Field(
        8,
        ge=1,
        description="Sampler engines at once on groups that are not leased; further ones wait "
        "until one ends or has nothing to do.",
    )
    openai_idle_ttl: float = Field(
        900.0, gt=0, description="An owner's engines for /v1 stop when unused for this long."
    )
    sampler_idle_ttl: float = Field(
        3600.0, gt=0, description="Ephemeral sampling sessions end when unused for this long."
    )
    history_ttl: float = Field(
        30 * 86_400.0,
        gt=0,
        description="Operations, sessions, runs without a checkpoint, sampling sessions, removed "
        "weight versions and workers are forgotten this long after their end, and never before "
        "result_ttl. Usage and audit remain.",
    )
    quarantine_ttl: float = Field(
        30 * 86_400.0,
        gt=0,
        description="Complete checkpoints of which the database knows nothing are kept in "
        "quarantine for this long.",
    )
    min_free_bytes: int = Field(64 * 2**20, ge=0, description="With less free, publishing fails.")
    delta_versions: Literal["auto", "on", "off"] = Field(
        "off",
        description="Whether weights for a run's own sampler are written as what changed since "
        "earlier ones, for runs that do not say it: fewer bytes, which pays on a shared volume. "
        "auto: where they are in bfloat16.",
    )
    weights_handoff: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether an engine on its trainer's only device takes new weights from the "
        "trainer's memory, where there is room for a copy, and not from their files. auto: on a "
        "GPU.",
    )

    trainer: TrainerEnvironment = Field(default_factory=TrainerEnvironment)
    sharing: SharingSettings = Field(default_factory=SharingSettings)
    pool: PoolSettings = Field(default_factory=PoolSettings)
    kubernetes: KubernetesSettings = Field(default_factory=KubernetesSettings)
    sampler: SamplerEnvironment = Field(default_factory=SamplerEnvironment)
    limit: LimitSettings = Field(default_factory=LimitSettings)

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
    """Return what is wrong with the settings. Literal example: `TANDEM_PORT is 'abc': Input should
    be a valid integer, unable to parse string as an integer`."""
    if isinstance(error, SettingsError):  # a list or an object that cannot be parsed
        field = re.search(r'"(\w+)"', str(error))
        return f"TANDEM_{field[1].upper()} is not JSON" if field else str(error)
    prefix = _prefix_of(error.title)

    def named(where: tuple[int | str, ...], given: object) -> str:
        """Return the setting with its value; "" where the fault is that of several."""
        return f"{prefix}{'_'.join(map(str, where)).upper()}{_shown(given)}: " if where else ""

    return "; ".join(
        f"{named(each['loc'], each['input'])}{each['msg'].removeprefix('Value error, ')}"
        for each in error.errors(include_url=False, include_context=False)
    )


def _shown(value: object) -> str:
    return "" if isinstance(value, (dict, list)) else f" is {str(value)[:80]!r}"


def _prefix_of(name: str) -> str:
    """Return the prefix of the variables that a class of settings reads."""
    found = (kind for kind in BaseSettings.__subclasses__() if kind.__name__ == name)
    kind = next(found, GatewaySettings)
    return str(kind.model_config.get("env_prefix", ""))
