"""Writes a tiny base model from a seed: `python -m tandem.demo.tiny_model DIRECTORY [SEED]`.

It is a Qwen3 model in the Hugging Face layout, with a character-level tokenizer. `--tokenizer qwen`
gives it a tokenizer with Qwen's special tokens and a chat template with tools. It needs no torch.
numpy draws the weights, so a seed gives the same bytes on every machine."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from tandem.demo.qwen_tokenizer import END, write_qwen_tokenizer
from tandem.demo.qwen_tokenizer import PAD as QWEN_PAD

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


@dataclass(frozen=True)
class TinyShape:
    """Sizes of a Qwen3 model. The default has 1.07 M parameters.

    `kv_heads` 0: as many as `heads`."""

    hidden: int = 128
    layers: int = 4
    ffn: int = 512
    heads: int = 4
    head_dim: int = 32
    vocabulary: int = 128
    max_length: int = 512
    tied: bool = True
    kv_heads: int = 0


QWEN_SHAPE = TinyShape(layers=2, ffn=256, vocabulary=2048, max_length=32768)
"""The default for `tokenizer="qwen"`: long enough for published recipes and agents."""


def write_tiny_model(
    path: Path,
    *,
    seed: int,
    shape: TinyShape | None = None,
    tokenizer: Literal["characters", "qwen"] = "characters",
) -> None:
    """Write config, tokenizer and `model.safetensors` (float32) into `path`."""
    shape = shape or (TinyShape() if tokenizer == "characters" else QWEN_SHAPE)
    write_layout(path, shape, tokenizer=tokenizer)
    _write_weights(path, shape, seed)


def write_layout(
    path: Path, shape: TinyShape, *, tokenizer: Literal["characters", "qwen"] = "characters"
) -> None:
    """Write config and tokenizer only. See `tensor_shapes` for the weights."""
    path.mkdir(parents=True, exist_ok=True)
    if tokenizer == "characters":
        _write_tokenizer(path, shape)
        _write_config(path, shape, pad=0, ends=[1])
    else:
        ids = write_qwen_tokenizer(path, vocabulary=shape.vocabulary, max_length=shape.max_length)
        _write_config(path, shape, pad=ids[QWEN_PAD], ends=[ids[END], ids[QWEN_PAD]])


def characters() -> list[str]:
    """Return the characters from token 3 on: printable ASCII and the newline."""
    return [*(chr(code) for code in range(32, 127)), "\n"]


def _write_tokenizer(path: Path, shape: TinyShape) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *characters()])}
    assert len(vocabulary) <= shape.vocabulary
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS, UNKNOWN])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "pad_token": PAD,
                "eos_token": EOS,
                "unk_token": UNKNOWN,
                "model_max_length": shape.max_length,
                "clean_up_tokenization_spaces": False,
            },
            indent=1,
        )
    )


def _write_config(path: Path, shape: TinyShape, *, pad: int, ends: list[int]) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads or shape.heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_length,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "initializer_range": 0.02,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "float32",
        "pad_token_id": pad,
        "eos_token_id": ends[0],
    }
    (path / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"eos_token_id": ends if len(ends) > 1 else ends[0], "pad_token_id": pad}
    (path / "generation_config.json").write_text(json.dumps(generation))


def tensor_shapes(shape: TinyShape) -> dict[str, tuple[int, ...]]:
    """Return all tensors' shapes, in the order of drawing. Norms have one dimension and are filled
    with ones."""
    hidden, width = shape.hidden, shape.heads * shape.head_dim
    kv_width = (shape.kv_heads or shape.heads) * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (width, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_width, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_width, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, width),
            f"{prefix}.self_attn.q_norm.weight": (shape.head_dim,),
            f"{prefix}.self_attn.k_norm.weight": (shape.head_dim,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (shape.ffn, hidden),
            f"{prefix}.mlp.up_proj.weight": (shape.ffn, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, shape.ffn),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not shape.tied:
        shapes["lm_head.weight"] = (shape.vocabulary, hidden)
    return shapes


def _write_weights(path: Path, shape: TinyShape, seed: int) -> None:
    from safetensors.numpy import save_file

    random = np.random.default_rng(seed)
    tensors = {
        name: np.ones(size, np.float32)
        if len(size) == 1
        else (0.02 * random.standard_normal(size)).astype(np.float32)
        for name, size in tensor_shapes(shape).items()
    }
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a tiny base model, from a seed.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--tokenizer", choices=["characters", "qwen"], default="characters")
    asked = parser.parse_args()
    write_tiny_model(asked.directory, seed=asked.seed, tokenizer=asked.tokenizer)
