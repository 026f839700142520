"""Tiny seeded models in the Hugging Face layout."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Literal

Architecture = Literal["qwen3", "llama", "gpt_neox", "qwen3_moe"]

ARCHITECTURES: tuple[Architecture, ...] = ("qwen3", "llama", "gpt_neox", "qwen3_moe")
VOCABULARY = 96
MAX_LENGTH = 64


def write_tiny_model(
    path: Path,
    *,
    architecture: Architecture = "qwen3",
    seed: int = 0,
    head_dim: int = 16,
    max_length: int = MAX_LENGTH,
    hidden: int = 32,
    intermediate: int = 64,
) -> Path:
    """Write a model of some ten thousand parameters, with a tokenizer of one character per token.

    `qwen3` ties its embeddings, `llama` and `gpt_neox` do not. The files of `qwen3_moe` differ from
    its modules. Weights are larger than usual, so that predictions are not flat. vLLM on a CPU
    needs a `head_dim` of 32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = _config(architecture, head_dim=head_dim, max_length=max_length)
    config.hidden_size, config.intermediate_size = hidden, intermediate
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def _config(architecture: Architecture, *, head_dim: int, max_length: int):
    from transformers import GPTNeoXConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": max_length,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if architecture == "qwen3":
        return Qwen3Config(
            **common, num_key_value_heads=1, head_dim=head_dim, tie_word_embeddings=True
        )
    if architecture == "qwen3_moe":
        return Qwen3MoeConfig(
            **common,
            num_key_value_heads=1,
            head_dim=head_dim,
            tie_word_embeddings=False,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
        )
    if architecture == "llama":
        return LlamaConfig(
            **common, num_key_value_heads=2, head_dim=head_dim, tie_word_embeddings=False
        )
    return GPTNeoXConfig(**common, tie_word_embeddings=False)


def write_tokenizer(path: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = (string.digits + string.ascii_letters + string.punctuation + " ")[: VOCABULARY - 3]
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    for character in characters:
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(path)
