"""A good body for every route that takes JSON, by the name of the route's function."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tests.fuzz.seeds import RUN, SESSION, custom_loss_body

SAMPLER = f"{SESSION}:sample:0"
WEIGHTS = f"tinker://{RUN}/weights/kept"
SEQ = 424_242
"""Stands for the next place in the run's log."""
MODEL_FOLDER = "/fuzz-model-folder"
"""Stands for the folder of a model."""

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
            "cursor": {
                "last_created_at": "2026-07-01T00:00:00+00:00",
                "last_session_id": SESSION,
            },
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
    }
