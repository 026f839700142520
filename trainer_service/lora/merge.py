"""Merge an adapter into its base model, without a trainer:
`python -m trainer_service.lora.merge ADAPTER_DIR BASE_DIR OUT_DIR`.

Only the largest tensor must fit into memory. The result has the layout and dtypes of the base
model's files, and loads in transformers and vLLM as it is."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from safetensors import safe_open
from torch import nn

from tandem.errors import InvalidRequest, NameTaken, TandemError
from tandem.weights import open_version
from tandem.weights.adapter_files import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    key_of,
    modules_of,
    read_scale,
)
from tandem.weights.layout import TensorWriter, copy_small_files, write_index
from tandem.weights.manifest import MANIFEST_NAME
from tandem.weights.model_config import model_files
from tandem.weights.store import fsync_path
from tandem.weights.tensors import StoredTensor, read_header
from trainer_service.lora.adapters import merged
from trainer_service.models.huggingface import empty_model, name_in_files

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AdapterFiles:
    """`modules` are the adapted ones, and `scale` is alpha / r."""

    directory: Path
    modules: list[str]
    scale: float

    def update(self, weight: Tensor, *, module: str) -> Tensor:
        """W + scale · B A, in the dtype of `weight` [out, in]."""
        with safe_open(str(self.directory / WEIGHTS_NAME), framework="pt") as file:
            a = file.get_tensor(key_of(module, side="A"))
            b = file.get_tensor(key_of(module, side="B"))
        if (b.shape[0], a.shape[1]) != tuple(weight.shape) or a.shape[0] != b.shape[1]:
            raise InvalidRequest(
                f"the adapter's {module} is [{b.shape[0]}, {a.shape[1]}], the base model's "
                f"{list(weight.shape)}: it belongs to another base model"
            )
        return merged(weight, a=a, b=b, scale=self.scale).to(weight.dtype)


@dataclass(frozen=True)
class _Step:
    """One tensor to write, with the adapter of `module`, if any."""

    source: StoredTensor
    module: str


def merge(adapter_dir: Path, base_dir: Path, out_dir: Path) -> int:
    """Write the merged model into `out_dir`, whole or not at all. Return its size in bytes.

    Raises `NameTaken`, `LoadFailed` (a damaged adapter), or `InvalidRequest` (not a LoRA adapter of
    this base model)."""
    if out_dir.exists():
        raise NameTaken(f"{out_dir.name} exists already; name a directory that does not")
    adapter = _open_adapter(adapter_dir)
    files = {file.name: read_header(file) for file in model_files(base_dir)}
    if not files:
        raise InvalidRequest(f"{base_dir.name} holds no safetensors file to merge into")
    plan, untied = _plan(adapter, base_dir, files)
    partial = out_dir.parent / f".partial-{out_dir.name}-{os.getpid()}"
    partial.mkdir(parents=True)
    try:
        for name, steps in plan.items():
            _write(partial / name, steps, adapter)
        others = copy_small_files(base_dir, partial, untied=untied)
        if len(plan) > 1:
            others.append(
                write_index(
                    partial,
                    weight_map={tensor: name for name, steps in plan.items() for tensor in steps},
                    total_bytes=sum(
                        step.source.bytes for steps in plan.values() for step in steps.values()
                    ),
                )
            )
        for path in others:
            fsync_path(path)
        fsync_path(partial)
        size = sum(file.stat().st_size for file in partial.iterdir())
        if out_dir.exists():  # a rename would replace an empty directory made meanwhile
            raise NameTaken(f"{out_dir.name} was made by another program; name another directory")
        partial.rename(out_dir)
        fsync_path(out_dir.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return size


def _open_adapter(directory: Path) -> AdapterFiles:
    if not (directory / CONFIG_NAME).is_file() or not (directory / WEIGHTS_NAME).is_file():
        raise InvalidRequest(
            f"{directory.name} is not an adapter: it lacks {CONFIG_NAME} or {WEIGHTS_NAME}"
        )
    if (directory / MANIFEST_NAME).is_file():  # published by a trainer, not by another program
        open_version(directory)
    with safe_open(str(directory / WEIGHTS_NAME), framework="pt") as file:
        modules = modules_of(list(file.keys()), where=directory.name)
    return AdapterFiles(directory=directory, modules=modules, scale=read_scale(directory))


def _plan(
    adapter: AdapterFiles, base_dir: Path, files: Mapping[str, Mapping[str, StoredTensor]]
) -> tuple[dict[str, dict[str, _Step]], bool]:
    """The steps of each file, and whether the output head gets its own weight."""
    model = empty_model(base_dir)
    module_of = {name_in_files(model, f"{name}.weight"): name for name in adapter.modules}
    head, embedding = _tied_weights(model)
    untied = head in module_of
    plan = {
        name: {tensor: _Step(place, module_of.pop(tensor, "")) for tensor, place in header.items()}
        for name, header in files.items()
    }
    if head in module_of:  # otherwise the files hold the head already
        everything = {name: place for header in files.values() for name, place in header.items()}
        if embedding in everything:
            plan[max(plan)][head] = _Step(everything[embedding], module_of.pop(head))
    if module_of:
        raise InvalidRequest(
            f"the base model's files have no {min(module_of)}, which the adapter changes: it "
            "belongs to another base model, or the files are laid out otherwise"
        )
    return plan, untied


def _tied_weights(model: nn.Module) -> tuple[str, str]:
    """The names, in files, of a tied head's weight and of the embedding's. "" if not tied."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or not model.config.get_text_config().tie_word_embeddings:
        return "", ""
    names = {module: name for name, module in model.named_modules()}
    first, second = (name_in_files(model, f"{names[part]}.weight") for part in (head, embedding))
    return first, second


def _write(path: Path, steps: Mapping[str, _Step], adapter: AdapterFiles) -> None:
    writer = TensorWriter({tensor: step.source for tensor, step in steps.items()})
    with path.open("wb") as file:
        file.write(writer.header)
        for tensor in writer.order:
            step = steps[tensor]
            if step.module:
                _write_merged(file, step, adapter)
            else:
                step.source.copy_to(file)
        file.flush()
        os.fsync(file.fileno())


def _write_merged(file: BinaryIO, step: _Step, adapter: AdapterFiles) -> None:
    with safe_open(str(step.source.file), framework="pt") as source:
        weight = source.get_tensor(step.source.name)
    if not weight.is_floating_point():
        raise InvalidRequest(f"{step.source.name} is {weight.dtype}: a quantized base model")
    updated = adapter.update(weight, module=step.module).contiguous()
    file.write(updated.view(torch.uint8).numpy().tobytes())


def main() -> None:
    """Print one line of JSON. On an error print a sentence to stderr and exit with 1."""
    parser = argparse.ArgumentParser(prog="python -m trainer_service.lora.merge")
    for name in ("adapter_dir", "base_dir", "out_dir"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    try:
        size = merge(arguments.adapter_dir, arguments.base_dir, arguments.out_dir)
    except (TandemError, OSError) as error:
        print(error.message if isinstance(error, TandemError) else error, file=sys.stderr)
        raise SystemExit(1) from error
    print(json.dumps({"path": str(arguments.out_dir), "bytes": size}))


if __name__ == "__main__":
    main()
