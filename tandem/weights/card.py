"""The README of a published adapter."""

from __future__ import annotations

from collections.abc import Collection

from tandem.protocol.worker import LoraSpec

CARD_NAME = "README.md"

_CARD = """\
---
base_model: {base}
library_name: peft
pipeline_tag: text-generation
tags:
- lora
- tandem
---

# A LoRA adapter of {base}

Rank {rank}, trained with Tandem. It adapts {layers}.

- **PEFT** loads it: `PeftModel.from_pretrained(base_model, FOLDER)`.
{programs}
- `tandem checkpoints export --merged` writes a whole model, which transformers, vLLM and other
  programs load as it is.
"""
_PLAIN = """\
- **PEFT** merges it (`merge_and_unload`), and so does tinker-cookbook (`weights.build_hf_model`).
- **vLLM** serves it (`--enable-lora`) if vLLM has adapters for the base model's class."""
_UNTIED = """\
- **PEFT** merges it (`merge_and_unload`), and so does tinker-cookbook (`weights.build_hf_model`).
- **vLLM** serves it (`--enable-lora`) only for classes of models whose `embedding_modules` list the
  output head, such as Llama and Qwen 3. Train with `train_unembed=False` for the others."""
_TIED = """\
- **Do not merge it with PEFT's `merge_and_unload`.** The base model's output head and its
  embeddings share one weight. The adapter changes the head alone, and PEFT would change both.
- **tinker-cookbook** (`weights.build_hf_model`, `merge_tinker_adapter_to_hf_model`) refuses to
  merge it for the same reason: "lm_head.weight … does not exist in the model state dict". Use
  `tandem checkpoints export --merged`, which gives the head a weight of its own, or train with
  `train_unembed=False`. `weights.build_lora_adapter` takes it.
- **vLLM** serves it (`--enable-lora`) only for classes of models whose `embedding_modules` list the
  output head, such as Llama and Qwen 3."""


def adapter_card(*, base: str, lora: LoraSpec, targets: Collection[str], tied: bool) -> str:
    """`tied`: the base model's output head has no weight of its own."""
    programs = (_TIED if tied else _UNTIED) if lora.unembedding else _PLAIN
    layers = ", ".join(f"`{name}`" for name in targets)
    return _CARD.format(base=base, rank=lora.rank, layers=layers, programs=programs)
