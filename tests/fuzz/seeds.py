"""Bodies as the SDK writes them, and a good body for every JSON route.

Mutations begin from them. Their placeholders have the length of real ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
from tinker import types

from tandem.wire.v1 import tinker_pb2
from tests.support.custom_losses import request_body, traced
from tests.support.sdk import datum, request_of

SESSION = "s-0123456789ab"
RUN = f"{SESSION}:train:0"

_PER_TOKEN = ("weights", "mask", "logprobs", "advantages", "ref_logprobs", "sequence_ratio_mask")
_SETTINGS: dict[str, dict[str, float | str]] = {
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "ipo": {"beta": 0.1},
}


def protobuf_seeds(losses: list[str]) -> list[tinker_pb2.ForwardBackwardRequest]:
    """Return a request for every loss, and some with every field of a datum."""
    seeds = [_request([_datum(5), _datum(3)], loss) for loss in losses]
    seeds += [
        _request([_sparse_datum()], "cross_entropy"),
        _request([_spanned_datum(), _datum(4)], "importance_sampling"),
        _request([_image_datum()], "cross_entropy"),
        _request([_datum(40) for _ in range(16)], "ppo"),
        _request([_wide_datum()], "cross_entropy"),
        *[_request([_datum_of_custom_loss(), _datum_of_custom_loss()], "custom")] * 3,
    ]
    return seeds


def custom_loss_body() -> bytes:
    """Return the SDK's body for a custom loss with inputs of one and two dimensions."""

    def loss(logprobs, line, pair):
        return (logprobs * line.sum()).sum() + pair.sum(), {"custom/line:sum": line.sum()}

    return request_body(traced(loss, logprobs=1, line=1, pair=2), session_id=SESSION)


def _request(data: list[types.Datum], loss: str) -> tinker_pb2.ForwardBackwardRequest:
    message = request_of(data, loss, _SETTINGS.get(loss, {}))
    message.model_id = RUN
    return tinker_pb2.ForwardBackwardRequest.FromString(message.SerializeToString())


def _datum(length: int) -> types.Datum:
    inputs = dict.fromkeys(_PER_TOKEN, np.full(length, 0.5, np.float32))
    tokens = [1 + i % 60 for i in range(length + 1)]
    return datum(tokens, desirable=np.ones(1, np.float32), **inputs)


def _wide_datum() -> types.Datum:
    weights = np.full((3, 2), 0.5, np.float32)
    return datum([1, 2, 3, 9], targets=np.array([[1, 2], [3, 4], [5, 6]]), weights=weights)


def _sparse_datum() -> types.Datum:
    def sparse(data: list[float] | list[int], dtype: str) -> types.TensorData:
        return types.TensorData(
            data=data,
            dtype=dtype,
            shape=[3, 4],
            sparse_crow_indices=[0, 1, 2, 3],
            sparse_col_indices=[0, 1, 3],
        )

    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={
            "target_tokens": sparse([5, 6, 7], "int64"),
            "weights": sparse([1.0, 1.0, 0.5], "float32"),
        },
    )


def _spanned_datum() -> types.Datum:
    spans = [
        types.PromptProvenanceSpan(sequence_id="a:0", offset=0, length=1),
        types.SampledProvenanceSpan(sequence_id="a:0", offset=0, length=3),
    ]
    plain = _datum(4)
    return types.Datum(
        model_input=plain.model_input,
        loss_fn_inputs=plain.loss_fn_inputs,
        model_input_spans=spans,
        loss_fn_input_spans=spans,
    )


def _image_datum() -> types.Datum:
    image = types.ImageChunk(data=np.arange(16, dtype=np.uint8).tobytes(), format="png")
    inputs = datum([1, 1]).loss_fn_inputs
    return types.Datum(model_input=types.ModelInput(chunks=[image]), loss_fn_inputs=inputs)


def _datum_of_custom_loss() -> types.Datum:
    made = datum([1, 2, 3, 3], line=np.array([1, 2], np.float32))
    made.loss_fn_inputs["pair"] = types.TensorData(
        data=[1.0, 2.0],
        dtype="float32",
        shape=[2, 3],
        sparse_crow_indices=[0, 1, 2],
        sparse_col_indices=[0, 2],
    )
    return made


# --- JSON ------------------------------------------------------------------------------------

SAMPLER = f"{SESSION}:sample:0"
WEIGHTS = f"tinker://{RUN}/weights/kept"
SEQ = 424_242
MODEL_FOLDER = "/fuzz-model-folder"
_PLACE = {"model_id": RUN, "seq_id": SEQ}
_OPENAI = {
    "model": "tiny",
    "max_tokens": 4,
    "temperature": 1.0,
    "n": 1,
    "seed": 7,
    "stop": ["x"],
    "stream": False,
}


_ANTHROPIC = {
    "model": "tiny",
    "max_tokens": 4,
    "system": "s",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": "2"}],
        },
    ],
    "tools": [{"name": "add", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["x"],
    "temperature": 1.0,
    "stream": False,
}


def json_seeds() -> Sequence[tuple[str, object]]:
    return [
        *_seeds().items(),
        (
            "load_weights",
            {
                "session_id": SESSION,
                "model_seq_id": 2,
                "path": WEIGHTS,
                "optimizer": False,
                "weights_access_token": "tml-lent",
                "user_metadata": {"a": "b"},
            },
        ),
        ("sign_in", {"form_token": "", "key": "tml-fuzz"}),
        ("sign_out", {"form_token": ""}),
        ("stop_run_form", {"form_token": ""}),
        ("switch_playground", {"form_token": "", "open": "yes"}),
        (
            "start_trial_form",
            {"blueprint": "grpo-arithmetic", "model": "tiny", "value:steps": "3", "seed": "1"},
        ),
        ("end_trial_form", {"form_token": ""}),
        ("chat", {"model": "tiny", "message": "hello"}),
        ("chat_stream", {"model": "tiny", "message": "hello"}),
        ("optim_step", {**_PLACE, "optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}),
        (
            "asample",
            {
                "base_model": "tiny",
                "prompt": {"chunks": [{"tokens": [1]}]},
                "sampling_params": {"stop": [1, 2], "max_tokens": 1},
            },
        ),
    ]


def _seeds() -> Mapping[str, object]:
    return {
        "optim_step": {
            **_PLACE,
            "adam_params": {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12},
        },
        "save_weights": {**_PLACE, "path": "state", "overwrite": True, "ttl_seconds": 3600},
        "save_weights_for_sampler": {
            **_PLACE,
            "path": "policy",
            "user_metadata": {"a": "b"},
            "kind": "snapshot",
        },
        "save_weights_external": {**_PLACE, "path": "export", "age_encryption_recipients": None},
        "load_weights": {**_PLACE, "path": WEIGHTS, "optimizer": True},
        "create_model": {
            "session_id": SESSION,
            "model_seq_id": 1,
            "base_model": "tiny:full",
            "user_metadata": {"a": "b"},
            "lora_config": {"rank": 8, "seed": 1},
            "optimizer_config": {"type": "adamw"},
        },
        "get_info": {"model_id": RUN},
        "stop_run": {"discard": False},
        "create_job": {
            "backend": "trl",
            "model": "tiny",
            "configuration": {"method": "sft", "steps": 1},
            "data": {"train": '{"prompt": "1", "completion": "2"}', "eval": ""},
            "name": "sums",
            "tags": ["a"],
            "processes": 1,
            "priority": 0,
            "max_restarts": 0,
            "deadline": "3600",
            "ttl_seconds": 3600,
        },
        "start_trial": {
            "blueprint": "sft-chat",
            "model": "tiny",
            "values": {"steps": 3},
            "seed": 1,
        },
        "change_playground": {"open": True},
        "keep_claim": {"attempt": 1},
        "end_claim": {
            "attempt": 1,
            "error": "no data",
            "numbers": {"loss": 0.5},
            "violations": {"loss": "0.5, and at most 0.1 is expected"},
            "weights": "tinker://s-ab12:train:0/sampler_weights/final",
        },
        "change_run": {
            "name": "first",
            "tags": ["a"],
            "config": {"lr": 0.1, "nested": {"seed": 1}},
            "user_metadata": {"a": "b", "c": None},
        },
        "add_metrics": {"rows": [{"step": 1, "at": 1.5e9, "values": {"reward": 0.5, "x": "NaN"}}]},
        "add_rollouts": {
            "batch": "b-1",
            "step": 1,
            "rollouts": [{"prompt": "p", "answer": "a", "reward": 1.0, "tokens": [1, 2]}],
        },
        "change_owner": {"runs": 4, "device_hours": 0.5, "tokens": None, "anew": True},
        "create_custom_loss": json.loads(custom_loss_body()),
        "retrieve_future": {"request_id": f"{RUN}:1", "allow_metadata_only": True},
        "retrieve_futures": {
            "target": {
                "type": "sampling_session",
                "sampling_session_id": SAMPLER,
                "cloned_sampler_id": 0,
            },
            "prev_cursor": 0,
            "timeout": 0.01,
            "retrieved_request_ids": [f"{SAMPLER}:0"],
        },
        "cancel_future": {"request_id": f"{SAMPLER}:0"},
        "create_sampling_session": {
            "session_id": SESSION,
            "sampling_session_seq_id": 1,
            "base_model": "tiny",
            "model_path": None,
        },
        "change_sampling_session": {"min_version": None, "max_staleness": 2},
        "score_sequences": {"sampling_session_id": SAMPLER, "sequences": [[1, 2, 3], [4], []]},
        "join_sampling_session": {"sampling_session_id": SAMPLER},
        "asample": {
            "sampling_session_id": SAMPLER,
            "seq_id": 1,
            "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {
                "max_tokens": 4,
                "seed": 3,
                "stop": ["x"],
                "temperature": 1.0,
                "top_k": -1,
                "top_p": 1.0,
                "min_p": 0.1,
                "presence_penalty": 1.0,
            },
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 0,
            "target_prompt_logprobs": {"data": [1, 2, 3], "dtype": "int64", "shape": [3]},
        },
        "create_session": {
            "tags": ["a"],
            "user_metadata": {"a": "b"},
            "sdk_version": "0.38.0",
            "display_name": "name",
            "project_id": "project",
        },
        "session_heartbeat": {"session_id": SESSION},
        "finish_session": {"reason": {"type": "success"}, "detail": "done"},
        "client_config": {"sdk_version": "0.38.0"},
        "telemetry": {"events": [{"event": "x"}], "platform": "y", "sdk_version": "z"},
        "search_sessions": {
            "session_id": SESSION,
            "project_ids": ["project"],
            "user_metadata": {"a": "b"},
            "display_name": "name",
            "owner": {"type": "own", "owner_urns": []},
            "statuses": [{"type": "client_finished", "reasons": ["success"]}],
            "limit": 5,
            "cursor": {"last_created_at": "2026-07-01T00:00:00+00:00", "last_session_id": SESSION},
        },
        "assign_session_project": {"project_id": "project"},
        "set_checkpoint_ttl": {"ttl_seconds": 3600},
        "weights_info": {"tinker_path": WEIGHTS},
        "copy_weights": {
            "source_path": WEIGHTS,
            "destination_project_id": "project",
            "session_id": None,
            "model_seq_id": 3,
            "ttl_seconds": 3600,
        },
        "scale_sampler": {"replicas": 2, "wait": 0.1},
        "add_model": {"name": "other", "path": MODEL_FOLDER},
        "create_key": {"owner": "ann", "role": "reader", "name": "a", "expires_in": 60},
        "openai_completions": {
            **_OPENAI,
            "prompt": [1, 2, 3],
            "logprobs": 2,
            "echo": False,
            "stop_token_ids": [5],
            "structured_outputs": None,
            "return_token_ids": True,
        },
        "openai_chat_completions": {
            **_OPENAI,
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            ],
            "logprobs": True,
            "top_logprobs": 2,
            "tools": None,
            "response_format": {"type": "text"},
            "chat_template_kwargs": {"a": 1},
        },
        "create_trace": {"model": "tiny", "max_staleness": 2, "tool_parser": "hermes"},
        "anthropic_messages": _ANTHROPIC,
        "trace_messages": _ANTHROPIC,
        "trace_chat_completions": {**_OPENAI, "messages": [{"role": "user", "content": "hello"}]},
    }
