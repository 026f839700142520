"""Custom losses as the SDK traces and sends them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from tinker import types
from tinker.lib.public_interfaces.custom_loss import LossHandle, encode_graph, trace_loss

from tandem.errors import CustomLossFailed
from trainer_service.losses.base import DatumLayout, Loss, LossResult, Totals

CustomLossFn = Callable[..., tuple[torch.Tensor, Mapping[str, torch.Tensor]]]


def traced(fn: CustomLossFn, **ranks: int) -> LossHandle:
    return trace_loss(fn, ranks, "s-test")


def request_body(handle: LossHandle, *, number: int = 0, session_id: str = "s-test") -> bytes:
    request = types.CreateCustomLossRequest(
        session_id=session_id,
        custom_loss_seq_id=number,
        name=handle.name,
        inputs=list(handle.inputs),
        graph=encode_graph(handle),
    )
    return request.model_dump_json().encode()


def metrics_of(loss: Loss, result: LossResult) -> dict[str, float]:
    """Return the metrics of one micro-batch. Raises `CustomLossFailed`."""
    if failure := loss.failure():
        raise CustomLossFailed(failure)
    return loss.metrics(dict(zip(loss.sum_names, map(float, result.sums), strict=True)))


def layout_of(
    logprobs: Sequence[torch.Tensor], arrays: Mapping[str, Sequence[torch.Tensor]]
) -> DatumLayout:
    """Return the layout of datums with targets in the shapes of these logprobs."""
    sizes = tuple(each.numel() for each in logprobs)
    datum = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return DatumLayout(
        datum=datum,
        datums=len(sizes),
        totals=Totals(datums=len(sizes), entries=sum(sizes), active=sum(sizes)),
        sizes=sizes,
        widths=tuple(each.shape[1] if each.ndim == 2 else 0 for each in logprobs),
        sequence=datum,
        sequences=len(sizes),
        arrays={name: tuple(values) for name, values in arrays.items()},
    )
