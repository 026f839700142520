"""Products with the matrices of linear layers by oneDNN, for compiled blocks on a CPU where torch's
own are slow.

torch multiplies float32 matrices by MKL, which computes on AMD's processors with AVX2 also where
they have AVX-512: 100 GFLOP/s a core, where oneDNN, which is a part of torch, reaches 200. oneDNN
prepares each product of other sizes, in some tenths of a millisecond, and keeps what it has
prepared: half a MiB for each. So packed rows get padding up to one of a few lengths (`row_length`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

_SHORTEST = 16
_AMD = "AuthenticAMD"


def faster_by_onednn(device: str) -> bool:
    """Whether products of float32 matrices are, on the processor that this is."""
    return (
        device == "cpu"
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _AMD in Path("/proc/cpuinfo").read_text()
    )


def row_length(tokens: int) -> int:
    """How long a row of so many tokens is computed: at most an eighth longer, or 16. Literal
    examples: 5 gives 16, 700 gives 704."""
    step = max(_SHORTEST, 1 << max(0, (tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step


def multiply_by_onednn(model: nn.Module) -> None:
    """Let the linear layers of a model in float32 compute with oneDNN."""
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = _OneDnnLinear  # a forward of each one's own would be compiled anew


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What `functional.linear` computes of `x` […, in] and `weight` [out, in]."""
    rows: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight)
    y = rows.view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


class _OneDnnLinear(nn.Linear):  # type: ignore[misc]  # torch is Any to mypy
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


# An operator of its own, since the compiler takes torch's for one whose weights never change.

_OPERATORS = torch.library.Library("tandem", "FRAGMENT")
_OPERATORS.define(
    "product(Tensor a, Tensor b) -> Tensor",
    tags=torch.Tag.needs_exact_strides,
)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a` [n, k] and the transpose of `b` [m, k], multiplied: [n, m]. A transposed `a` is copied, a
    transposed `b` is not."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return found


def _shape(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])


_OPERATORS.impl("product", _product, "CPU")
torch.library.register_fake("tandem::product", _shape, lib=_OPERATORS)


class _Linear(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to mypy
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        found: Tensor = torch.ops.tandem.product(x, weight)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        product = torch.ops.tandem.product
        return (
            product(gradient, weight.t()) if of_x else None,
            product(gradient.t(), x.t()) if of_weight else None,
        )
