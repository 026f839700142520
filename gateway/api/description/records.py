"""The forms of what is listed: checkpoints, runs, sessions, usage, audit, the platform's state."""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime, JsonValue

from gateway.api.description.base import AnswerFields
from gateway.auth.keys import Role

Metadata = dict[str, str] | None


class CheckpointInfo(AnswerFields):
    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: AwareDatetime
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: Metadata
    expires_at: AwareDatetime | None


class PageCursor(AnswerFields):
    offset: int
    limit: int
    total_count: int


class CheckpointPage(AnswerFields):
    checkpoints: list[CheckpointInfo]
    cursor: PageCursor


class RunCheckpoints(AnswerFields):
    checkpoints: list[CheckpointInfo]


class SignedUrls(AnswerFields):
    """Addresses by file name, which need no key until they expire."""

    urls: dict[str, str]
    expires: AwareDatetime


class OptimizerOfWeights(AnswerFields):
    type: Literal["adamw", "dimuon"]
    version: int | None = None


class WeightsInfo(AnswerFields):
    base_model: str
    is_lora: bool
    optimizer_config: OptimizerOfWeights
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


class Copied(AnswerFields):
    tinker_path: str


class RunInfoOfList(AnswerFields):
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    lora_rank: int | None
    corrupted: bool
    last_request_time: AwareDatetime
    last_checkpoint: CheckpointInfo | None
    last_sampler_checkpoint: CheckpointInfo | None
    user_metadata: Metadata


class RunPage(AnswerFields):
    training_runs: list[RunInfoOfList]
    cursor: PageCursor


class SessionIds(AnswerFields):
    sessions: list[str]


class SessionContents(AnswerFields):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: Metadata
    display_name: str | None


class EndReason(AnswerFields):
    type: Literal["success", "errored", "interrupted"]


class SessionStatus(AnswerFields):
    type: Literal["active", "client_finished"]
    reason: EndReason | None = None
    detail: str | None = None


class SessionSummary(AnswerFields):
    """The status is null for a session that expired."""

    session_id: str
    created_at: AwareDatetime
    owner: str
    project_id: str | None
    status: SessionStatus | None
    checkpoints_count: int
    display_name: str | None
    user_metadata: Metadata
    checkpoint_storage_bytes: int


class NextPage(AnswerFields):
    last_created_at: AwareDatetime
    last_session_id: str


class SessionPage(AnswerFields):
    sessions: list[SessionSummary]
    next_cursor: NextPage | None


class TraceExport(AnswerFields):
    status: Literal["pending", "ready", "failed"]
    url: str | None
    error: str | None


# --- Usage and audit: there are no prices here -----------------------------------------------


class TokensUsed(AnswerFields):
    type: Literal["training", "sampling_prefill", "sampling_sample"]
    token_count: int
    cached: bool | None = None


class CheckpointsSaved(AnswerFields):
    type: Literal["checkpoint"]
    count: int


class UsageOfHour(AnswerFields):
    bucket_start: AwareDatetime
    bucket_end: AwareDatetime
    base_model: str
    user_id: str
    user_name: str
    session_id: str
    project_id: str | None
    estimated_cost_usd: None
    effective_rate_usd_per_million_tokens: None
    effective_rate_usd_per_gigabyte_month: None
    event_info: TokensUsed | CheckpointsSaved
    accelerator_seconds: float


class MetadataOfSession(AnswerFields):
    user_metadata: Metadata


class UsageEvents(AnswerFields):
    data: list[UsageOfHour]
    sessions: dict[str, MetadataOfSession]
    cost_data_through: None


class StorageOfProject(AnswerFields):
    project_id: str | None
    org_user_urn: str
    user_email: None
    user_name: str
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: None


class CheckpointStorage(AnswerFields):
    effective_rate_usd_per_gigabyte_month: None
    data: list[StorageOfProject]


class AuditEntry(AnswerFields):
    """`event_details` has the actor, the target, the address, the status, and what the action
    notes beside them."""

    timestamp: AwareDatetime
    event: str
    event_details: dict[str, JsonValue]
    tinker_path: str | None
    model_id: str | None


class AuditLog(AnswerFields):
    entries: list[AuditEntry]


# --- The platform's state: times are seconds since 1970 --------------------------------------


class GatewayStatus(AnswerFields):
    version: str
    pid: int
    started_at: float
    data_dir: str


class SessionNow(AnswerFields):
    id: str
    owner: str
    display_name: str | None
    created_at: float
    idle_seconds: float


class RunNow(AnswerFields):
    id: str
    session_id: str
    base_model: str
    state: str
    reason: str
    worker: str
    step: int
    parameters: int
    ranks: int
    queued: int
    under_way: int
    weight_version: str


class SamplerNow(AnswerFields):
    session_id: str
    base_model: str
    state: str
    reason: str
    worker: str
    weight_version: str
    adapters: list[str]
    max_lora_rank: int
    waiting: int


class SamplingSessionNow(AnswerFields):
    id: str
    kind: str
    base_model: str
    weight_version: str


class WorkerNow(AnswerFields):
    id: str
    kind: str
    session_id: str
    run_id: str | None
    state: str
    pid: int
    address: str
    metrics_port: int
    log: str
    age_seconds: float


class Status(AnswerFields):
    gateway: GatewayStatus
    sessions: list[SessionNow]
    runs: list[RunNow]
    samplers: list[SamplerNow]
    sampling_sessions: list[SamplingSessionNow]
    workers: list[WorkerNow]


class KeyInfo(AnswerFields):
    """A key without the key itself."""

    id: str
    owner: str
    role: Role
    name: str
    state: Literal["active", "expired", "revoked"]
    created_at: AwareDatetime
    expires_at: AwareDatetime | None
    revoked_at: AwareDatetime | None
    last_used_at: AwareDatetime | None
    local: bool


class NewKeyInfo(KeyInfo):
    """With the key itself, this once."""

    key: str


class KeyList(AnswerFields):
    keys: list[KeyInfo]
