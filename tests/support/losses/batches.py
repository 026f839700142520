"""Batches as a client sends them, with every input of any loss."""

from __future__ import annotations

import numpy as np

from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.tiny_model import VOCABULARY
from tests.support.trainer_worker import datum, request
from trainer_service.losses import LOSSES

REQUESTS: dict[str, tuple[str, dict[str, float | str]]] = {
    **{name: (name, {}) for name in LOSSES},
    "cross_entropy, mean": ("cross_entropy", {"aggregation": "token_mean"}),
    "importance_sampling, geometric": (
        "importance_sampling",
        {"correction": "geometric", "geometric_low": 0.45, "geometric_high": 1.4},
    ),
    "ppo, token mean": ("ppo", {"aggregation": "token_mean", "kl_coeff": 0.1}),
    "ppo, sequence mean": (
        "ppo",
        {"aggregation": "seq_mean_token_mean", "correction": "seq_tis+off_policy_mask"},
    ),
    "cispo, constant": ("cispo", {"aggregation": "constant", "max_length": 20.0}),
    "dpo, mean": ("dpo", {"aggregation": "mean"}),
}
"""Requests for real parts: every loss, and all options that depend on the whole request."""


def mixed_data(count: int = 12, seed: int = 0, *, spans: bool = False) -> list[wire.Datum]:
    """Return datums of different lengths with different numbers."""
    rng = np.random.default_rng(seed)
    data = []
    for number, length in enumerate(rng.integers(1, 20, count)):
        made = datum(
            rng.integers(0, VOCABULARY, length).tolist(),
            logprobs=rng.normal(-4, 0.5, length),
            advantages=rng.normal(0, 1, length),
            weights=rng.uniform(0.1, 1, length),
            ref_logprobs=rng.normal(-4, 0.5, length),
            old_logprobs=rng.normal(-4, 0.5, length),
            mask=rng.integers(0, 2, length),
            desirable=rng.integers(0, 2, 1),
        )
        if spans and number % 3:
            for field in (made.model_input_spans, made.loss_fn_input_spans):
                field.add().prompt_tokens.sequence_id = "asked"
                field[0].prompt_tokens.length = length // 3
                field.add().sampled_tokens.sequence_id = "told"
                field[1].sampled_tokens.length = length - length // 3
        data.append(made)
    return data


def mixed_request(name: str, data: list[wire.Datum] | None = None) -> wire.ForwardBackwardRequest:
    """Return a request. Names that are not in `REQUESTS` mean a custom loss."""
    loss, settings = REQUESTS.get(name, ("custom", {}))
    message = request(data or mixed_data(spans=loss == "stable_reinforce"), loss)
    for key, value in settings.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config_v2[key].number = value
    return message
