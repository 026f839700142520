from __future__ import annotations

import pytest

from tandem.weights.model_config import (
    experts_of,
    head_size,
    why_unserved_by_cpu,
    why_unsharded,
    why_untrained,
)

LLAMA3 = {"rope_type": "llama3", "factor": 8.0}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"is_encoder_decoder": True}, "an encoder"),
        ({"vision_config": {"depth": 2}, "text_config": {}}, "vision_config"),
        ({"audio_config": {"layers": 2}}, "audio_config"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' rotary"),
        ({"rope_scaling": {"type": "su"}}, "'su' rotary"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' rotary"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}, "sliding": LLAMA3}},
            "'dynamic' rotary",
        ),
        ({"text_config": {"rope_scaling": {"rope_type": "dynamic"}}}, "'dynamic' rotary"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
        ({"text_config": {"layer_types": ["mamba", "attention"]}}, "'mamba'"),
    ],
)
def test_a_model_that_cannot_be_trained_says_why(config, reason):
    found = why_untrained(config)
    assert found.startswith("cannot be trained: ")
    assert reason in found


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        ({"num_experts": 8, "num_experts_per_tok": 2}, (8, 2)),
        ({"moe_num_experts": 64, "moe_k": 6}, (64, 6)),  # Ernie 4.5
        ({"num_experts": 16, "moe_topk": [1, 2]}, (16, 2)),  # HunYuan
        ({"n_routed_experts": 512, "moe_topk": 12}, (512, 12)),  # LongCat
        ({"num_experts": 128, "top_k_experts": 8}, (128, 8)),  # Gemma 4
        ({"num_experts": 4}, (4, 4)),
        ({"num_experts": None, "top_k_experts": None}, (0, 0)),
    ],
)
def test_the_experts_of_a_layer_and_of_a_token_are_found_by_their_names(config, experts):
    assert experts_of(config) == experts


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"is_encoder_decoder": False, "rope_scaling": None, "layer_types": None},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": {"full_attention": LLAMA3, "sliding_attention": {"rope_type": "yarn"}}},
        {"layer_types": ["full_attention", "sliding_attention"], "vision_config": None},
    ],
)
def test_nothing_is_said_against_a_model_whose_sequences_stay_apart(config):
    assert why_untrained(config) == ""


@pytest.mark.parametrize(
    ("experts", "ranks", "divided", "without"),
    [
        (8, 8, 1, False),
        (8, 6, 1, True),  # two each
        (12, 8, 4, False),  # three over two shards
        (8, 16, 8, True),
        (2, 2, 2, False),
    ],
)
def test_a_copy_is_not_on_ranks_of_which_some_would_have_no_expert(
    experts: int, ranks: int, divided: int, without: bool
) -> None:
    found = why_unsharded({"num_local_experts": experts}, ranks=ranks, divided=divided)
    assert found.startswith(f"it has {experts} experts") == without
    assert why_unsharded({"num_local_experts": 0}, ranks=ranks, divided=divided) == ""


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"head_dim": 48, "hidden_size": 64, "num_attention_heads": 4}, 48),
        ({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}, 16),
        ({"model_type": "gpt2", "n_embd": 64, "n_head": 2}, 32),
        ({"text_config": {"head_dim": 20}}, 20),
        ({"model_type": "gemma2", "hidden_size": 64, "num_attention_heads": 4}, None),
        ({"head_dim": 16, "kv_lora_rank": 8}, None),
        ({"model_type": "llama", "hidden_size": "64", "num_attention_heads": 0}, None),
        ({}, None),
    ],
)
def test_the_size_of_heads_is_read_where_a_configuration_says_it(config, size):
    assert head_size(config) == size


def test_a_size_of_heads_that_a_cpu_does_not_compute_is_named():
    assert why_unserved_by_cpu(64) == ""
    assert "heads have 16 numbers each" in why_unserved_by_cpu(16)
