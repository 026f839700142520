"""Notes what vLLM packs on a CPU, where the weight of a linear layer is gone once it is packed.

The packed copy belongs to native code and cannot be read. So the sum of a weight
(`tandem/weights/sums.py`) is taken at the moment in which it is packed, and forgotten before a
load: a layer that a load does not pack has none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sampler_service.vllm.internals import before_packing, parts_of_worker
from tandem.weights.sums import sum_of

_SUMS = "tandem_packed_sums"


def note_packed_weights(dtype: torch.dtype) -> None:
    """From now on, note what is packed in this process, for an engine that computes in this
    type."""

    def note(layer: torch.nn.Module) -> None:
        if not layer.weight.is_meta and layer.weight.dim() == 2:
            parts = parts_of_worker(layer, layer.weight)
            setattr(layer, _SUMS, {part: sum_of(each, dtype) for part, each in parts.items()})

    before_packing(note)


def forget_packed_weights(model: torch.nn.Module) -> None:
    for module in model.modules():
        if _SUMS in vars(module):  # a layer with adapters passes on what its plain one has
            setattr(module, _SUMS, {})


def parameter_sums(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, int]:
    """Return the sum of each parameter's numbers, by part, and of those that only a packed copy
    has."""
    seen: dict[int, dict[str, int]] = {}

    def of(layer: torch.nn.Module, parameter: torch.Tensor, name: str = "") -> dict[str, int]:
        place = parameter.data_ptr()
        if place not in seen:
            parts = parts_of_worker(layer, parameter)
            seen[place] = {part: sum_of(each, dtype, name=name) for part, each in parts.items()}
        return seen[place]

    sums = {
        name + part: value
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.numel()
        for part, value in of(model.get_submodule(name.rpartition(".")[0]), parameter, name).items()
    }
    for name, module, packed in _packed(model):
        if module.weight.numel() == 0:
            sums |= {f"{name}.weight{part}": value for part, value in packed.items()}
        else:  # an output head, which is packed beside the embeddings
            beside = sum(packed.values()) - sum(of(module, module.weight).values())
            sums[f"{name}.packed"] = beside
    return sums


def _packed(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, dict[str, int]]]:
    for name, module in model.named_modules():
        packed = vars(module).get(_SUMS)
        if packed is not None:
            yield name, module, packed
