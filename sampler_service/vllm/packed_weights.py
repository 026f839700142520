"""Notes what vLLM packs on a CPU, where the weight of a linear layer is gone once it is packed.

The packed copy belongs to native code and cannot be read. So the sum of a weight
(`weights/sums.py`) is taken at the moment in which it is packed, and forgotten before a load: a
layer that a load does not pack has none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sampler_service.vllm.internals import before_packing
from sampler_service.weights.sums import sum_of

_SUM = "tandem_packed_sum"


def note_packed_weights(dtype: torch.dtype) -> None:
    """From now on, note what is packed, in an engine that computes in this type."""

    def note(layer: torch.nn.Module) -> None:
        if not layer.weight.is_meta and layer.weight.dim() == 2:
            setattr(layer, _SUM, sum_of(layer.weight, dtype))

    before_packing(note)


def forget_packed_weights(model: torch.nn.Module) -> None:
    for module in model.modules():
        if _SUM in vars(module):  # a layer with adapters passes on what its plain one has
            setattr(module, _SUM, 0)


def parameter_sums(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, int]:
    """Return the sum of each parameter's numbers, and of those that only a packed copy has."""
    seen: dict[int, int] = {}

    def of(parameter: torch.Tensor, name: str = "") -> int:
        place = parameter.data_ptr()
        if place not in seen:
            seen[place] = sum_of(parameter, dtype, name=name)
        return seen[place]

    sums = {
        name: of(parameter, name)
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.numel()
    }
    for name, packed, weight in _packed(model):
        if weight.numel() == 0:
            sums[f"{name}.weight"] = packed
        else:  # an output head, which is packed beside the embeddings
            sums[f"{name}.packed"] = packed - of(weight)
    return sums


def _packed(model: torch.nn.Module) -> Iterator[tuple[str, int, torch.Tensor]]:
    for name, module in model.named_modules():
        packed = vars(module).get(_SUM)
        if packed is not None:
            yield name, packed, module.weight
