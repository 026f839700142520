"""Tiny models of many architectures, which trainers and samplers must support."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.protocol.worker import LoraSpec
from tests.support.tiny_model import VOCABULARY, write_tokenizer

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
WINDOW = 8
_HEADS = {"num_attention_heads": 4, "head_dim": 32}
_WHOLE = ["full_attention"] * 2
_TIED = {"tie_word_embeddings": True}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "topk_group": 1}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    # Normed queries and keys, heads wider than hidden size / heads, tied.
    "qwen3": {**_COMMON, **_HEADS, **_TIED},
    # Biases of queries, keys and values.
    "qwen2": {**_COMMON, **_TIED},
    # Scaled rotary frequencies for long texts.
    "llama": {**_COMMON, "rope_parameters": _LLAMA3},
    # A window for every layer.
    "mistral": {**_COMMON, **_HEADS, "sliding_window": WINDOW},
    # A window for every other layer, caps on attention and logits.
    "gemma2": {
        **_COMMON,
        **_HEADS,
        **_TIED,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 32,
    },
    # Windows for five layers of six, with separate rotary frequencies.
    "gemma3_text": {
        **_COMMON,
        **_HEADS,
        **_TIED,
        "num_hidden_layers": 6,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 32,
    },
    # Queries, keys and values in one layer, gate and up in another.
    "phi3": _COMMON,
    # Absolute positions, transposed weights.
    "gpt2": _GPT2,
    # Queries, keys and values in one layer, blocks in parallel.
    "gpt_neox": _COMMON,
    # Absolute positions that begin at 2.
    "opt": {**_COMMON, **_TIED, "ffn_dim": 128, "word_embed_proj_dim": 64},
    # Norms after attention and feed-forward layer.
    "olmo2": _COMMON,
    # A factor on logits, blocks in parallel.
    "cohere": {**_COMMON, **_TIED, "logit_scale": 0.3},
    # Factors on embeddings, attention, residuals and logits.
    "granite": {
        **_COMMON,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.5,
        "logits_scaling": 5.0,
    },
    # A bias of the head too, blocks in parallel.
    "phi": _COMMON,
    # Biases everywhere, tied.
    "starcoder2": {**_COMMON, **_TIED, "sliding_window": None},
    # Keys and values of one head, in one layer with the queries. Absolute positions.
    "gpt_bigcode": _GPT2,
    # Norms without weights, a clip of queries, keys and values.
    "olmo": {**_COMMON, "clip_qkv": 2.0},
    # Normed queries and keys, norms after each layer, tied.
    "exaone4": {**_COMMON, **_HEADS, **_TIED, "sliding_window": None, "layer_types": _WHOLE},
    # Rotation of half a head, norms before and after each layer.
    "glm4": {**_COMMON, "head_dim": 32, "partial_rotary_factor": 0.5},
    # Heads wider than hidden size / heads, factors on embeddings, tied.
    "gemma": {**_COMMON, **_HEADS, **_TIED},
    # A layer without rotation, tied.
    "smollm3": {**_COMMON, **_TIED, "no_rope_layers": [1, 0]},
    # Rotation of a part of a head.
    "stablelm": {**_COMMON, "partial_rotary_factor": 0.5},
    # One head of keys and values, blocks in parallel, tied.
    "falcon": {**_COMMON, **_TIED, "multi_query": True},
    # A bias of the head, blocks in parallel.
    "gptj": {**_GPT2, "rotary_dim": 16, "tie_word_embeddings": False},
    # Experts with separate tensors in the files, but one tensor in memory.
    "qwen3_moe": {**_COMMON, **_HEADS, **_EXPERTS, "num_experts": 4},
    # A shared expert, with a gate.
    "qwen2_moe": {
        **_COMMON,
        **_EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 48,
    },
    # Experts with other names.
    "mixtral": {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    # Latent attention, groups of experts, a shared one, one dense block, a router with a bias.
    "deepseek_v3": {
        **_COMMON,
        **_EXPERTS,
        **_SHARED,
        "n_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    # The same with ordinary attention.
    "glm4_moe": {**_COMMON, **_HEADS, **_EXPERTS, **_SHARED, "n_group": 1},
    # Attention sinks, and experts in one tensor, also in the files.
    "gpt_oss": {
        **_COMMON,
        **_HEADS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
EXPERTS = frozenset(["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss"])


HEAD_ALONE = frozenset(["falcon", "gpt2", "gptj"])


def lora_of(architecture: str) -> LoraSpec:
    """Return the largest choice of layers that the architecture allows."""
    head_alone = architecture in HEAD_ALONE
    return LoraSpec(
        rank=4, seed=5, attention=not head_alone, mlp=not head_alone and architecture not in EXPERTS
    )


def write_model(path: Path, architecture: str, **changes: object) -> Path:
    """Write a model of some hundred thousand parameters with a tokenizer.

    Its weights are larger than usual, so that predictions are not flat."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **{**CONFIGURATIONS[architecture], **changes})
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.mul_(5.0)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path
