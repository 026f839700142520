"""Packed rows: sequences one after the other in a single row, without padding.

Only positions and attention depend on where a sequence begins. The attention is a transformers
implementation and an operator of its own. On a CPU every run of equally long sequences is one
causal call of torch's kernel, on a view of the row. On a GPU the row is one call of torch's
FlashAttention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad, scaled_dot_product_attention

from tandem.errors import describe
from trainer_service.same_bits import same_bits

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel


IMPLEMENTATION = "tandem_packed"
_TRIAL = "tandem_trial"
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Allowed difference of a packed row's logits, by their type."""
Run = tuple[int, int]
"""Equally long neighbours of a row: the number of sequences, and the tokens of each."""


def bounds_of(lengths: Sequence[int]) -> NDArray[np.int32]:
    """The start of each sequence of a row, and the end of the last. Example: [9, 4, 4]
    gives [0, 9, 13, 17]."""
    return np.cumsum([0, *lengths], dtype=np.int32)


def runs_of(bounds: Sequence[int]) -> list[Run]:
    """Groups equal neighbours. Example: [0, 9, 13, 17] gives [(1, 9), (2, 4)]."""
    lengths = (stop - start for start, stop in pairwise(bounds))
    return [(len(list(group)), length) for length, group in groupby(lengths)]


def row_inputs(
    positions: NDArray[np.int64], bounds: NDArray[np.int32], device: str
) -> dict[str, Tensor | int]:
    return {
        "position_ids": torch.from_numpy(positions).to(device, non_blocking=True),
        "bounds": torch.from_numpy(bounds).to(device, non_blocking=True),
        "longest": max(2, int(np.diff(bounds).max())),  # a compiler treats 1 as a constant
    }


def why_not_packed(model: nn.Module, *, device: str = "cpu") -> str:
    """Make the model accept packed rows if it computes equal logits on them, and return "".

    Otherwise return the reason. Models differ in their computation between tokens (recurrent
    layers, position biases, sinks), so this compares two sequences in a row with each alone, on
    `device`."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return f"{type(model).__name__} is no model of transformers"
    text = model.config.get_text_config()
    if not _windows_are_told(model):
        return "its attention is not told of each window or chunk"
    before = str(model.config._attn_implementation)
    vocabulary = int(text.vocab_size)
    first = torch.arange(5, device=device) % vocabulary
    second = torch.arange(7, 0, -1, device=device) % vocabulary
    positions = np.concatenate([np.arange(5), np.arange(7)])[None]
    with torch.no_grad():
        alone = [
            model(input_ids=tokens[None], use_cache=False).logits for tokens in (first, second)
        ]
        wanted = torch.cat(alone, dim=1)
        tolerance = _TOLERANCE[wanted.dtype] * max(1.0, float(wanted.abs().max()))
        try:
            pack(model)
            together = model(
                input_ids=torch.cat([first, second])[None],
                use_cache=False,
                **row_inputs(positions, bounds_of([5, 7]), device),
            ).logits
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            reason = describe(error, typed=True)[:300]
        else:
            off = float((together - wanted).abs().max())
            if off <= tolerance:
                return ""
            reason = f"logits of a packed row are off by {off:.3g}"
    model.set_attn_implementation(before)
    return reason


def pack(model: PreTrainedModel) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, packed_attention)
    model.set_attn_implementation(IMPLEMENTATION)


def _windows_are_told(model: PreTrainedModel) -> bool:
    """True if each layer's attention is told its window or chunk.

    A packed row has no mask, and some models pass windows only in masks."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    differs: list[nn.Module] = []

    def mask(*, local_size: int | None = None, **others: object) -> Tensor | None:
        """Return the window in place of a mask."""
        return torch.tensor(local_size) if local_size else None

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        sliding_window: int | None = None,
        **others: object,
    ) -> tuple[Tensor, None]:
        window = 0 if attention_mask is None else int(attention_mask)
        if window != (sliding_window or 0):
            differs.append(module)
        return query.new_zeros(*query.transpose(1, 2).shape[:3], value.shape[-1]), None

    ALL_MASK_ATTENTION_FUNCTIONS.register(_TRIAL, mask)
    ALL_ATTENTION_FUNCTIONS.register(_TRIAL, attention)
    before = str(model.config._attn_implementation)
    try:
        model.set_attn_implementation(_TRIAL)
        with torch.no_grad():
            device = next(model.parameters()).device
            model(input_ids=torch.zeros(1, 5, dtype=torch.int64, device=device), use_cache=False)
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        return False
    finally:
        model.set_attn_implementation(before)
    return not differs


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    bounds: Tensor | None = None,
    longest: int = 0,
    **others: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a row.

    `query` is [1, heads, T, head size]. `key` and `value` have equally many heads or fewer. Returns
    [1, T, heads, head size]. Without `bounds` the rows [B, heads, T, head size] are whole
    sequences. Raises `NotImplementedError` if the model needs more than scaling and a sliding
    window."""
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise NotImplementedError(f"packed attention does not support {name}")
    if bounds is None:
        return _whole(query, key, value, scaling, sliding_window).transpose(1, 2), None
    size, kept = query.shape[-1], value.shape[-1]
    if kept < size:  # the kernels take one head size, and zeros add nothing
        value = pad(value, (0, size - kept))
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attended = _Packed.apply(q, k, v, bounds, longest, scaling, sliding_window or 0)
    return attended[None, ..., :kept], None


def _whole(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    mask = _outside(query, window or 0)
    attended: Tensor = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if mask is None else ~mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended


# --- The operator -----------------------------------------------------------------------------
#
# Tokens are the first dimension of its tensors: query and result are [T, heads, head size]. `sums`
# are the logarithms of softmax's denominators: [T, heads] on a CPU, [heads, T] on a GPU. The bounds
# are a tensor, so that compiled code does not depend on a row's layout. The GPU kernel also needs
# the length of the `longest` sequence.

_KERNELS = torch.ops.aten
_OPERATORS = torch.library.Library("tandem", "DEF")
_OPERATORS.define(
    "packed_attention(Tensor query, Tensor key, Tensor value, Tensor bounds, SymInt longest,"
    " float? scale, int window) -> (Tensor, Tensor)",
    tags=torch.Tag.needs_exact_strides,
)
_OPERATORS.define(
    "packed_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor out,"
    " Tensor sums, Tensor bounds, SymInt longest, float? scale, int window)"
    " -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.needs_exact_strides,
)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float | None,
    window: int,
) -> tuple[Tensor, ...]:
    found = []
    for q, k, v in _runs(bounds, query, key, value):
        mask = _mask(q, window)
        found.append(
            _KERNELS._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
            )
        )
    return _rows(found)


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float | None,
    window: int,
) -> tuple[Tensor, ...]:
    found = []
    for g, q, k, v, o, s in _runs(bounds, gradient, query, key, value, out, sums):
        mask = _mask(q, window)
        found.append(
            _KERNELS._scaled_dot_product_flash_attention_for_cpu_backward(
                g, q, k, v, o, s, 0.0, mask is None, attn_mask=mask, scale=scale
            )
        )
    return _rows(found)


def _forward_on_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float | None,
    window: int,
) -> tuple[Tensor, Tensor]:
    out, sums, *_ = _KERNELS._flash_attention_forward(
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        0.0,
        not window,
        False,
        scale=scale,
        **_window_on_gpu(window),
    )
    return out, sums


def _backward_on_gpu(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float | None,
    window: int,
) -> tuple[Tensor, ...]:
    none = query.new_empty(0)  # dropout draws no numbers
    state = query.new_zeros(2, dtype=torch.uint64)
    with same_bits():
        found: tuple[Tensor, ...] = _KERNELS._flash_attention_backward(
            gradient,
            query,
            key,
            value,
            out,
            sums,
            bounds,
            bounds,
            longest,
            longest,
            0.0,
            not window,
            state,
            none,
            scale=scale,
            **_window_on_gpu(window),
        )
    return found


def _window_on_gpu(window: int) -> dict[str, int]:
    """A window counts the token itself. The kernel counts only earlier tokens."""
    return {"window_size_left": window - 1, "window_size_right": 0}


def _shapes(query: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(query.dtype, torch.float32)
    tokens, heads = query.shape[:2]
    shape = (heads, tokens) if query.device.type == "cuda" else (tokens, heads)
    return query.new_empty(query.shape), query.new_empty(shape, dtype=dtype)


def _gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: object
) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in (query, key, value))


_OPERATORS.impl("packed_attention", _forward, "CPU")
_OPERATORS.impl("packed_attention_backward", _backward, "CPU")
_OPERATORS.impl("packed_attention", _forward_on_gpu, "CUDA")
_OPERATORS.impl("packed_attention_backward", _backward_on_gpu, "CUDA")
torch.library.register_fake("tandem::packed_attention", _shapes, lib=_OPERATORS)
torch.library.register_fake("tandem::packed_attention_backward", _gradients, lib=_OPERATORS)


class _Packed(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to mypy
    """The operator with its gradients, not registered with it because of torch's call overhead."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor,
        longest: int,
        scale: float | None,
        window: int,
    ) -> Tensor:
        given = longest, scale, window
        out, sums = torch.ops.tandem.packed_attention(query, key, value, bounds, *given)
        ctx.save_for_backward(query, key, value, out, sums, bounds)
        ctx.given = given
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = torch.ops.tandem.packed_attention_backward(gradient, *ctx.saved_tensors, *ctx.given)
        return (*found, None, None, None, None)


def _runs(bounds: Tensor, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """For each run, views [count, heads, length, …] of rows [T, heads, …]."""
    runs = runs_of(bounds.tolist())
    sizes = [count * length for count, length in runs]
    for run, *parts in zip(runs, *(row.split(sizes) for row in rows), strict=True):
        yield tuple(part.unflatten(0, run).transpose(1, 2) for part in parts)


def _rows(runs: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Rows [T, heads, …] of the runs' results [count, heads, length, …]."""
    kinds = zip(*runs, strict=True)
    rows = [[part.transpose(1, 2).flatten(0, 1) for part in kind] for kind in kinds]
    return tuple(parts[0].contiguous() if len(parts) == 1 else torch.cat(parts) for parts in rows)


def _mask(query: Tensor, window: int) -> Tensor | None:
    outside = _outside(query, window)
    if outside is None:
        return None
    return query.new_zeros(outside.shape).masked_fill_(outside, -torch.inf)


def _outside(query: Tensor, window: int) -> Tensor | None:
    """The pairs of tokens that do not see each other, [length, length]. None: only causality."""
    length = query.shape[-2]
    if not 0 < window < length:
        return None
    age = torch.arange(length, device=query.device)
    distance = age[:, None] - age
    return (distance < 0) | (distance >= window)
