"""What a model's configuration says against training it."""

from __future__ import annotations

import pytest

from tandem.model_config import why_untrained

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
