"""Packed rows: sequences one after the other in a single row, so that nothing is padded.

Everything that a transformer computes token by token (projections, norms, feed-forward layers,
the head) is independent of where a sequence begins; positions are given, and attention is told.
It is registered with transformers as an attention implementation: every run of equally long
sequences is one causal call of torch's attention, on a view of the row. `docs/performance.md`
has measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, cast

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel


IMPLEMENTATION = "tandem_packed"
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""By the type of the logits: how far a packed row may be off."""
RunLengths = tuple[tuple[int, int], ...]
"""The make-up of a row: (number of sequences, tokens of each) for each run, in order."""


def run_lengths_of(lengths: Sequence[int]) -> RunLengths:
    """Groups equal neighbours. Literal example: [9, 4, 4] gives ((1, 9), (2, 4))."""
    return tuple((len(list(group)), length) for length, group in groupby(lengths))


def can_pack(model: nn.Module) -> bool:
    """Makes the model accept packed rows and returns True, if it computes the same on them.

    Models differ in what they do between tokens (recurrent layers, position biases, sinks), so
    this compares two sequences in a row with each alone. Otherwise the model is unchanged.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return False
    text = model.config.get_text_config()
    if getattr(text, "attention_chunk_size", None):
        return False  # only the mask knows chunks, and they are longer than this trial
    before = str(model.config._attn_implementation)
    vocabulary = int(text.vocab_size)
    device = next(model.parameters()).device
    first = torch.arange(5, device=device) % vocabulary
    second = torch.arange(7, 0, -1, device=device) % vocabulary
    with torch.no_grad():
        alone = [
            model(input_ids=tokens[None], use_cache=False).logits for tokens in (first, second)
        ]
        try:
            _register(model)
            together = model(
                input_ids=torch.cat([first, second])[None],
                position_ids=torch.cat([torch.arange(n, device=device) for n in (5, 7)])[None],
                use_cache=False,
                run_lengths=((1, 5), (1, 7)),
            ).logits
        except (TypeError, ValueError, RuntimeError, NotImplementedError):
            together = None
    wanted = torch.cat(alone, dim=1)
    scale = max(1.0, float(wanted.abs().max()))
    tolerance = _TOLERANCE[wanted.dtype] * scale
    if together is not None and float((together - wanted).abs().max()) <= tolerance:
        return True
    model.set_attn_implementation(before)
    return False


def _register(model: PreTrainedModel) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, packed_attention)
    model.set_attn_implementation(IMPLEMENTATION)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    run_lengths: RunLengths = (),
    **others: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a row: `query` [1, heads, T, head size], `key`
    and `value` with as many heads or fewer; returns [1, T, heads, head size].

    Without `run_lengths` the rows [B, heads, T, head size] are whole sequences. Raises
    `NotImplementedError` if the model needs more than scaling and a sliding window.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise NotImplementedError(f"packed attention does not support {name}")
    if not run_lengths:
        return _attend(query, key, value, scaling, sliding_window).transpose(1, 2), None
    results: list[Tensor] = []
    # Not sliced: the gradient of each slice would be a whole row, zero but for the slice.
    sizes = [count * length for count, length in run_lengths]
    pieces = zip(*(tensor[0].split(sizes, dim=1) for tensor in (query, key, value)), strict=True)
    for (count, length), piece in zip(run_lengths, pieces, strict=True):
        q, k, v = (part.unflatten(1, (count, length)).transpose(0, 1) for part in piece)
        result = _attend(q, k, v, scaling, sliding_window)
        results.append(result.transpose(1, 2).reshape(count * length, *result.shape[1::2]))
    return torch.cat(results)[None], None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    length = query.shape[2]
    grouped = query.shape[1] != key.shape[1]
    mask = None
    if window is not None and length > window:
        age = torch.arange(length, device=query.device)
        distance = age[:, None] - age
        mask = (distance >= 0) & (distance < window)
    attended = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return cast("Tensor", attended)
