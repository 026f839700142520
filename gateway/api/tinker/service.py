"""Health, client configuration, SDK versions, capabilities and telemetry."""

from __future__ import annotations

import re
from typing import Literal, NoReturn

from pydantic import BaseModel, Field

from gateway.api.dependencies import AccessDep
from gateway.api.fields import Answer
from gateway.api.routing import Router
from tandem.errors import SdkTooOld, StorageFailed, StorageFull

router = Router("/api/v1", tag="SDK")

SDK_VERSION = ["The SDK must not be too old."]
ASKS = (
    "What the `user_metadata` asks for by names that begin with `tandem.` must be there, see "
    "`docs/sharing.md`."
)

OLDEST = (0, 25)
"""The first SDK that sends forward_backward only as protobuf."""

TESTED = (0, 27)
"""The first SDK in the conformance suite."""

_WANTED = f"tinker>={TESTED[0]}.{TESTED[1]}"
_RELEASE = re.compile(r"(\d+)\.(\d+)(?:\.\d+)?")


class ClientVersion(BaseModel):
    sdk_version: str = ""


_NO_VERSION = ClientVersion()


class TelemetryBatch(BaseModel):
    events: list[object] = Field(default_factory=list)


class Health(Answer):
    status: Literal["ok"] = "ok"


class Readiness(Answer):
    status: Literal["ready"] = "ready"


class Accepted(Answer):
    status: Literal["accepted"] = "accepted"


class ClientConfig(Answer):
    """Absent options have the SDK's default."""

    pjwt_auth_enabled: bool
    credential_default_source: str
    parallel_fwdbwd_chunks: bool
    proto_compress_fwdbwd: bool
    sample_use_retrieve_futures: bool
    custom_loss_server_side: bool
    sample_join_sampling_session: bool


class DynamicConfig(Answer):
    refresh_interval_sec: int
    sample_cancel_enabled: bool
    sample_cancel_max_batch_size: int


class SupportedModel(Answer):
    model_name: str
    max_context_length: int | None
    trainable: bool
    sampleable: bool


class Capabilities(Answer):
    supported_models: list[SupportedModel]


@router.operation("GET", "/healthz", role="none")
async def healthz() -> Health:
    """Answer while the gateway runs."""
    return Health(status="ok")


@router.operation("GET", "/readyz", role="none", errors=[StorageFailed, StorageFull])
async def readyz(access: AccessDep) -> Readiness:
    """Answer while the gateway can accept work: the database is writable, and the disk has
    `TANDEM_MIN_FREE_BYTES` free."""
    await access.gateway.database.check()
    await access.gateway.versions.check_space(expected_bytes=0, what="take on work")
    return Readiness(status="ready")


@router.operation("POST", "/client/config", role="reader", audit=None, rules=SDK_VERSION)
async def client_config(access: AccessDep, body: ClientVersion = _NO_VERSION) -> ClientConfig:
    """Return the client's configuration. Clients call it first, so an SDK that is too old is
    refused before anything else."""
    check_sdk_version(body.sdk_version)
    return ClientConfig(
        # The SDK exchanges its key for a token, which `whoami` needs.
        pjwt_auth_enabled=True,
        credential_default_source="api_key",
        # Chunks of one batch are sent at once, and sequence numbers keep the order. The SDK's
        # chunks (1024 datums, 5 MB) fill a micro-batch each, and the first is computed while others
        # arrive.
        parallel_fwdbwd_chunks=True,
        # Compression pays only on slow networks.
        proto_compress_fwdbwd=access.gateway.settings.compress_payloads,
        # A poll per sample is as fast and survives a restart of the gateway. The common poll cannot
        # report lost samples.
        sample_use_retrieve_futures=False,
        custom_loss_server_side=True,
        # Clients of one sampling session get unique numbers instead of random ones.
        sample_join_sampling_session=True,
    )


@router.operation("POST", "/client/dynamic_config", role="reader", audit=None)
async def dynamic_config() -> DynamicConfig:
    """Return the client's changing configuration. Clients report cancelled samples in batches."""
    return DynamicConfig(
        refresh_interval_sec=300, sample_cancel_enabled=True, sample_cancel_max_batch_size=64
    )


@router.operation("GET", "/get_server_capabilities", role="reader")
async def capabilities(access: AccessDep) -> Capabilities:
    """Return the registered base models. `max_context_length` is the model's limit, or its last
    engine's KV cache if that is smaller."""
    found = [
        SupportedModel(
            model_name=m.name,
            max_context_length=access.gateway.models.context_length(m),
            trainable=True,
            sampleable=True,
        )
        for m in access.gateway.models.all()
    ]
    return Capabilities(supported_models=found)


@router.operation(
    "POST",
    "/forward",
    role="ci",
    audit=None,
    rules=["Always refused: the SDK that calls it is too old."],
)
async def forward_of_old_sdk() -> NoReturn:
    """Refuse the call of SDKs before 0.25. Newer ones send forward to forward_backward."""
    raise json_refused("forward")


@router.operation("POST", "/telemetry", role="reader", audit=None)
async def telemetry(batch: TelemetryBatch, access: AccessDep) -> Accepted:
    """Count and drop the client's telemetry."""
    access.gateway.metrics.telemetry_events.inc(len(batch.events))
    return Accepted(status="accepted")


def check_sdk_version(version: str) -> str | None:
    """Return a warning for the client's log, if any. Raises `SdkTooOld`.

    Other version texts, such as custom builds, pass."""
    found = _RELEASE.match(version)
    if found is None:
        return None
    release = (int(found[1]), int(found[2]))
    if release < OLDEST:
        raise _too_old(f"the SDK tinker {version} is too old for this server")
    if release < TESTED:
        return (
            f"tinker {version} is older than what this server is tested with; if anything "
            f"fails, install {_WANTED}"
        )
    return None


def json_refused(what: str) -> SdkTooOld:
    return _too_old(
        f"{what} came in the form of SDKs older than tinker {OLDEST[0]}.{OLDEST[1]}, which this "
        "server does not take"
    )


def _too_old(why: str) -> SdkTooOld:
    return SdkTooOld(f'{why}. Install {_WANTED}: pip install --upgrade "{_WANTED}"')
