"""The files of a LoRA adapter in PEFT's format (huggingface/peft, docs: checkpoint format).

`adapter_config.json` lies beside `adapter_model.safetensors`, with the keys
`base_model.model.{module}.lora_A.weight` [r, in] and `….lora_B.weight` [out, r]."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import InvalidRequest, describe, without_paths

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def key_of(module: str, *, side: str) -> str:
    """The key of a module's A or B: `key_of("lm_head", side="A")` is
    `"base_model.model.lm_head.lora_A.weight"`."""
    return f"{_PREFIX}{module}.lora_{side}.weight"


def modules_of(keys: Sequence[str], *, where: str) -> list[str]:
    """The modules that have both A and B, sorted. Raises `InvalidRequest` for any other key."""
    modules = sorted(
        {
            key.removeprefix(_PREFIX).removesuffix(".lora_A.weight").removesuffix(".lora_B.weight")
            for key in keys
        }
    )
    wanted = {key_of(module, side=side) for module in modules for side in "AB"}
    if odd := sorted(wanted ^ set(keys)):
        raise InvalidRequest(f"{where} is not a LoRA adapter of linear layers: see {odd[0]}")
    return modules


@dataclass(frozen=True)
class AdapterConfig:
    """The contents of `adapter_config.json`. `targets` are PEFT's `target_modules`.

    `base_model` is a name at a hub, with its commit as `revision`, or the gateway's name."""

    base_model: str
    revision: str | None
    rank: int
    alpha: float
    targets: Sequence[str]

    def write_config(self, directory: Path) -> Path:
        """Write every setting of PEFT's, so that its defaults do not matter."""
        path = directory / CONFIG_NAME
        whole = int(self.alpha) if self.alpha == int(self.alpha) else self.alpha
        path.write_text(
            json.dumps(
                {
                    "peft_type": "LORA",
                    "task_type": "CAUSAL_LM",
                    "base_model_name_or_path": self.base_model,
                    "revision": self.revision,
                    "r": self.rank,
                    "lora_alpha": whole,
                    "target_modules": list(self.targets),
                    "lora_dropout": 0.0,
                    "bias": "none",
                    "fan_in_fan_out": False,
                    "inference_mode": True,
                    "init_lora_weights": True,
                    "modules_to_save": None,
                    "use_rslora": False,
                    "use_dora": False,
                    "rank_pattern": {},
                    "alpha_pattern": {},
                },
                indent=1,
            )
        )
        return path


def read_scale(directory: Path) -> float:
    """Return alpha / r. Raises `InvalidRequest` unless it is plain LoRA with one rank and one
    alpha."""
    try:
        config = json.loads((directory / CONFIG_NAME).read_text())
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = without_paths(describe(error))
        raise InvalidRequest(f"{directory.name} has no readable {CONFIG_NAME}: {why}") from error
    plain = config.get("peft_type") == "LORA" and config.get("bias", "none") == "none"
    others = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
    if not plain or any(config.get(name) for name in (*others, "modules_to_save")) or rank < 1:
        raise InvalidRequest(f"{directory.name} is not a plain LoRA adapter; see {CONFIG_NAME}")
    return alpha / rank
