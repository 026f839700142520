"""Facts about a model from its configuration files, without loading it.

The sources are Hugging Face's `config.json`, `generation_config.json`, `tokenizer_config.json` and
`tokenizer.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

Json = dict[str, object]

LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
HEAD_KEYS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_KEYS = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
INDEX_NAME = "model.safetensors.index.json"
"""Maps tensors to files, in a model of several files."""
_BY_LENGTH = {"dynamic", "longrope", "su"}
"""Rotary frequencies that depend on a batch's longest sequence. `su` is another name of
longrope."""
_HEADS = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "heads of keys and values",
}
_EAGER = {"bloom", "codegen", "deepseek_v4", "gpt_neo", "gpt_neox_japanese", "gpt_oss", "gptj"}
_EAGER |= {"granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash", "mpt", "openai-gpt", "xglm"}
"""Model types for which transformers has no SDPA."""
_WITHOUT_PLAN = {"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "opt"}
_WITHOUT_PLAN |= {"stablelm"}
_HEAD_ALONE = {"bloom", "falcon", "gpt2", "gptj"}
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Attention head sizes that vLLM's CPU build computes."""
_HEADS_BY_WIDTH = {"cohere", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo2", "phi3"}
_HEADS_BY_WIDTH |= {"qwen2", "smollm3", "stablelm"}
"""Model types whose default head size is the hidden size divided by the heads."""
_SINKS = {"gpt_oss", "granite_swa"}
_DIVIDED = {"cohere", "gemma2", "gemma3_text", "gpt_neox", "granite", "llama", "mistral"}
_DIVIDED |= {"qwen2", "qwen3"}
"""Model types by known division of their matrices: no plan in transformers, attention sinks, or a
complete plan. The trainer tries the others."""


def read_json(path: Path) -> Json:
    """Return an empty object if there is no file. Raises `ValueError`."""
    try:
        return cast(Json, json.loads(path.read_bytes()))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error


def model_files(directory: Path) -> list[Path]:
    """Return a model's safetensors files, chosen as transformers and vLLM do.

    If there is an index, only its files count: a second copy in another layout may lie beside them.
    Raises `ValueError` for an unreadable index."""
    places = read_json(directory / INDEX_NAME).get("weight_map")
    if isinstance(places, dict):
        return [directory / name for name in sorted(set(places.values()))]
    return sorted(directory.glob("*.safetensors"))


def text_config(directory: Path) -> Json:
    """Return `config.json` with the language model's part at the top level."""
    return _text(read_json(directory / "config.json"))


def _text(config: Mapping[str, object]) -> Json:
    nested = config.get("text_config")
    return {**config, **(cast(Json, nested) if isinstance(nested, dict) else {})}


def model_length(directory: Path) -> int | None:
    """Return the longest sequence of the model, in tokens."""
    config = text_config(directory)
    values = [config.get(key) for key in LENGTH_KEYS]
    return next((value for value in values if type(value) is int and value > 0), None)


def has_experts(directory: Path) -> bool:
    config = text_config(directory)
    return any(config.get(key) for key in _EXPERT_KEYS)


def experts_of(config: Mapping[str, object]) -> tuple[int, int]:
    """Return the number of experts per layer and of chosen experts per token, or zeros."""
    sizes = (config.get(key) for key in _EXPERT_KEYS)
    experts = next((size for size in sizes if isinstance(size, int)), 0)
    chosen: list[int] = []
    for value in map(config.get, _CHOSEN_KEYS):
        chosen += [value] if isinstance(value, int) else value if isinstance(value, list) else []
    return experts, max(chosen, default=experts)  # there may be a number for each layer


def has_eager_attention(config: Mapping[str, object]) -> bool:
    """Return whether trainers keep all scores of attention, for lack of a kernel."""
    return bool(config.get("attn_logit_softcapping")) or config.get("model_type") in _EAGER


def end_tokens(directory: Path) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of generation config, config and tokenizer, as vLLM does.

    Each file may name a token that the others lack. Ids outside the vocabulary are left out."""
    config = text_config(directory)
    named: list[object] = []
    for ids in (
        read_json(directory / "generation_config.json").get("eos_token_id"),
        config.get("eos_token_id"),
        _tokenizer_end_token(directory),
    ):
        named += ids if isinstance(ids, list) else [ids]
    vocabulary = config.get("vocab_size")
    end = vocabulary if isinstance(vocabulary, int) else sys.maxsize
    return tuple(dict.fromkeys(id_ for id_ in named if type(id_) is int and 0 <= id_ < end))


def _tokenizer_end_token(directory: Path) -> int | None:
    config = read_json(directory / "tokenizer_config.json")
    name = config.get("eos_token") or read_json(directory / "special_tokens_map.json").get(
        "eos_token"
    )
    content = name.get("content") if isinstance(name, dict) else name
    for id_, token in cast(dict[str, Json], config.get("added_tokens_decoder", {})).items():
        if token.get("content") == content:
            return int(id_)  # avoids reading the larger file
    tokenizer = read_json(directory / "tokenizer.json")
    for added in cast(list[Json], tokenizer.get("added_tokens", [])):
        if added.get("content") == content:
            return cast(int, added["id"])
    vocabulary = cast(Json, tokenizer.get("model", {})).get("vocab", {})
    if isinstance(vocabulary, dict):
        return cast(int | None, vocabulary.get(content))
    pieces = [piece for piece, _score in cast(list[tuple[str, float]], vocabulary)]
    return pieces.index(content) if content in pieces else None


def why_untrained(config: Mapping[str, object]) -> str:
    """Return why a model cannot be trained, or "". The text follows the model's name in a sentence.

    A sequence's logprobs must not depend on other sequences of the batch. Example:
    `why_untrained({"is_encoder_decoder": True})` is `"cannot be trained: it has an encoder, and
    only decoders of text are trained"`."""
    if config.get("is_encoder_decoder"):
        return "cannot be trained: it has an encoder, and only decoders of text are trained"
    if others := [key for key in ("vision_config", "audio_config") if config.get(key)]:
        return (
            f"cannot be trained: it reads more than text ({others[0]}), and only decoders of text "
            "are trained"
        )
    text = _text(config)
    if by_length := sorted(_BY_LENGTH.intersection(_rope_types(text))):
        return (
            f"cannot be trained: the frequencies of its {by_length[0]!r} rotary positions depend "
            "on the longest sequence of a batch, so that log probabilities would depend on what "
            "else is in the micro-batch"
        )
    kinds = text.get("layer_types")
    if others := sorted(set(map(str, kinds)) - _ATTENTION if isinstance(kinds, list) else ()):
        return (
            f"cannot be trained: it has layers of the type {others[0]!r}, and only attention to "
            "all tokens, to a window or to a chunk is known to hold sequences apart"
        )
    return ""


def head_alone(config: Mapping[str, object]) -> bool:
    """Return whether engines serve adapters only on the model's output head.

    In such models, vLLM reorders the other layers, or they are not linear."""
    return _text(config).get("model_type") in _HEAD_ALONE


def head_size(config: Mapping[str, object]) -> int | None:
    """Return the size of a model's attention heads. None if unclear, or with latent attention
    (MLA).

    Example: `head_size({"head_dim": 64})` is 64."""
    text = _text(config)
    if text.get("kv_lora_rank") is not None:
        return None
    size = text.get("head_dim")
    if type(size) is int and size > 0:
        return size
    width = text.get("hidden_size", text.get("n_embd"))
    heads = text.get("num_attention_heads", text.get("n_head"))
    plain = text.get("model_type") in _HEADS_BY_WIDTH and size is None
    if not plain or type(width) is not int or type(heads) is not int or heads < 1:
        return None
    return width // heads


def why_unserved_by_cpu(size: int) -> str:
    """Return why CPU engines cannot compute heads of this size, or ""."""
    if size in CPU_HEADS:
        return ""
    return (
        f"the model's attention heads have {size} numbers each, and vLLM's build for CPUs "
        f"computes heads of {', '.join(map(str, CPU_HEADS))}. The model can be trained and "
        "exported here, and sampled on a GPU"
    )


def why_undivided(config: Mapping[str, object], count: int) -> str:
    """Return why a model's matrices cannot be divided among `count` ranks, or "".

    Example: `why_undivided({"num_attention_heads": 9}, 2)` is `"its 9 attention heads are not a
    multiple of it"`."""
    text = _text(config)
    kind = text.get("model_type")
    if kind in _WITHOUT_PLAN:
        return "transformers has no plan for it"
    if kind in _SINKS:
        return "it has attention sinks, which are in no layer of their own"
    if odd := undivided_heads(text, count):
        return odd
    for key in _EXPERT_KEYS:
        experts = text.get(key)
        if isinstance(experts, int) and experts % count:
            return f"its {experts} experts are not a multiple of it"
    if kind in _DIVIDED:
        for key in ("intermediate_size", "vocab_size"):
            size = text.get(key)
            if isinstance(size, int) and size % count:
                return f"its {key} is {size}, which is not a multiple of it"
    return ""


def why_unsharded(config: Mapping[str, object], *, ranks: int, divided: int) -> str:
    """Return why a copy of the model cannot be sharded over `ranks` ranks, or "".

    Each rank needs at least one expert of a layer. `divided` ranks compute together. Example:
    `why_unsharded({"num_local_experts": 8}, ranks=16, divided=1)` is `"it has 8 experts, and a rank
    without any could not load it"`."""
    text, shards = _text(config), ranks // divided
    for key in _EXPERT_KEYS:
        experts = text.get(key)
        if not isinstance(experts, int) or not experts:
            continue
        sharded = experts // divided
        if sharded <= (shards - 1) * -(-sharded // shards):
            return f"it has {experts} experts, and a rank without any could not load it"
    return ""


def undivided_heads(config: Mapping[str, object], count: int) -> str:
    """A head stays whole."""
    for key, what in _HEADS.items():
        size = config.get(key)
        if isinstance(size, int) and size % count:
            return f"its {size} {what} are not a multiple of it"
    return ""


def _rope_types(config: Mapping[str, object]) -> Iterator[str]:
    for key in ("rope_parameters", "rope_scaling"):
        whole = config.get(key)
        if isinstance(whole, dict):
            for part in (whole, *whole.values()):
                if isinstance(part, dict):
                    yield str(part.get("rope_type") or part.get("type"))
