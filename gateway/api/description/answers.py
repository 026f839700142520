"""The forms of the answers to training and sampling. Times are ISO 8601 where they are text."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, JsonValue

from gateway.api.description.base import AnswerFields


class Promise(AnswerFields):
    """What an accepted operation is answered with; `retrieve_future` gives its result."""

    request_id: str
    model_id: str


class LossPromise(AnswerFields):
    request_id: str


class SamplePromise(AnswerFields):
    request_id: str
    sample_sequence_ids: list[str]


class ModelData(AnswerFields):
    arch: str | None
    model_name: str
    tokenizer_id: str


class OptimizerName(AnswerFields):
    type: Literal["adamw", "dimuon"]
    version: int | None = None


class RunInfo(AnswerFields):
    type: Literal["get_info"]
    model_id: str
    model_name: str
    is_lora: bool
    lora_rank: int | None
    model_data: ModelData
    optimizer_config: OptimizerName


class CreatedSamplingSession(AnswerFields):
    type: Literal["create_sampling_session"]
    sampling_session_id: str


class Joined(AnswerFields):
    type: Literal["join_sampling_session"]
    client_counter: int


class SamplerInfo(AnswerFields):
    sampler_id: str
    base_model: str
    model_path: str | None


# --- What operations come to -----------------------------------------------------------------


class FailedOperation(AnswerFields):
    """An accepted operation that failed: 200, since the question was answered."""

    error: str
    type: str
    category: Literal["user", "server"]


class ResultSize(AnswerFields):
    """Of a large result, to a client that asked to hear its size first."""

    request_id: str
    status: Literal["complete_metadata"]
    response_payload_size: int


class RunCreated(AnswerFields):
    type: Literal["create_model"]
    model_id: str


class Stepped(AnswerFields):
    type: Literal["optim_step"]
    metrics: dict[str, float | None]


class StateSaved(AnswerFields):
    type: Literal["save_weights"]
    path: str


class SavedForSampler(AnswerFields):
    """Either a named checkpoint's path, or the sampling session of an ephemeral one."""

    type: Literal["save_weights_for_sampler"]
    path: str | None = None
    sampling_session_id: str | None = None


class Exported(AnswerFields):
    type: Literal["save_weights_external"]
    path: str
    size_bytes: int


class StateLoaded(AnswerFields):
    type: Literal["load_weights"]
    path: str
    model_id: str


class CustomLossCreated(AnswerFields):
    type: Literal["create_custom_loss"]
    loss_id: str


class TryAgain(AnswerFields):
    """Not ended yet."""

    type: Literal["try_again"]
    request_id: str
    queue_state: Literal["active", "paused_capacity"]
    queue_state_reason: str | None


class Finished(AnswerFields):
    state: Literal["finished"]
    request_id: str
    response_payload_uncompressed_size: int


class Failed(AnswerFields):
    state: Literal["failed"]
    request_id: str


class Completions(AnswerFields):
    completions: list[Finished | Failed]
    cursor: int = Field(ge=0)


# --- The client's own affairs ----------------------------------------------------------------


class Health(AnswerFields):
    status: Literal["ok"]


class Accepted(AnswerFields):
    status: Literal["accepted"]


class ConfigOfClient(AnswerFields):
    pjwt_auth_enabled: bool
    credential_default_source: str
    parallel_fwdbwd_chunks: bool
    proto_compress_fwdbwd: bool
    sample_use_retrieve_futures: bool
    custom_loss_server_side: bool
    sample_join_sampling_session: bool


class DynamicConfig(AnswerFields):
    refresh_interval_sec: int
    sample_cancel_enabled: bool
    sample_cancel_max_batch_size: int


class SupportedModel(AnswerFields):
    model_name: str
    max_context_length: int | None
    trainable: bool
    sampleable: bool


class Capabilities(AnswerFields):
    supported_models: list[SupportedModel]


class CreatedSession(AnswerFields):
    type: Literal["create_session"]
    session_id: str
    warning_message: str | None


class Beat(AnswerFields):
    type: Literal["session_heartbeat"]


class Token(AnswerFields):
    jwt: str


class OwnKey(AnswerFields):
    key_id: int | str
    name: str
    note: str
    details: dict[str, dict[str, str]]


class ModelEntry(AnswerFields):
    """`max_length` in tokens, null where the model does not say."""

    name: str
    path: str
    max_length: int | None


class ModelList(AnswerFields):
    models: list[ModelEntry]


class Settings(AnswerFields):
    """The resolved settings, by name; without secrets."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]


class Version(AnswerFields):
    version: str
