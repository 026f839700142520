"""Which parameters Muon is not made for."""

from __future__ import annotations

from torch import nn


def outer_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the parameters of every embedding and of the output head, adapters of a LoRA run
    on the head included.

    Muon treats a matrix as a map between two spaces of features; a row of an embedding or of
    the head belongs to one token, and is an entry of a table (Jordan et al., "Muon", 2024).
    """
    head = model.get_output_embeddings()
    found: set[str] = set()
    for prefix, module in model.named_modules():
        if module is head or isinstance(module, nn.Embedding):
            named = module.named_parameters(prefix=prefix, remove_duplicate=False)
            found.update(name for name, _ in named)
    return frozenset(found)
