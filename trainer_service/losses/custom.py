"""The loss "custom": a function of one datum that the client traced and registered.

The function is computed for each datum on a leaf of its own, outside the model's graph, and
differentiated there; the model receives the loss's value and its derivative by the logprobs. A
mistake in a client's graph is thus found before it reaches a gradient of the model, and the
result is that of the SDK's own way (forward, derivative, weighted cross-entropy) in one pass.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from tandem.custom_losses import read_custom_loss
from tandem.custom_losses.interpreter import Interpreter, Limits, Result
from tandem.errors import CustomLossFailed, UnknownLoss, describe
from trainer_service.losses.base import (
    DatumLayout,
    DefinedLoss,
    Input,
    Loss,
    LossResult,
    Setting,
    Settings,
)

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.custom_losses import Graph

_COUNT = "datums"
_FAILED = "failed"


def custom_loss(definition: bytes, limits: Limits | None = None) -> Loss:
    """Return the loss of one request, made from the JSON body of create_custom_loss.

    Raises `UnknownLoss` for a request without a definition, `MalformedPayload` or
    `CustomLossInvalid`. The loss's `metrics` raises `CustomLossFailed` if it could not be
    computed for some datum, on whichever rank that was.
    """
    if not definition:
        raise UnknownLoss(
            "the loss 'custom' came without its definition: create one with "
            "ServiceClient.create_custom_loss and pass its handle to forward_backward_custom"
        )
    graph = read_custom_loss(definition)
    request = _Request(graph, limits or Limits())
    return Loss(
        name="custom",
        compute=request.compute,
        inputs=tuple(
            Input(
                each.name,
                "an input of the client's function",
                shape="free",
                required=True,
                finite=False,
                rank=each.rank,
            )
            for each in graph.inputs[1:]
        ),
        settings=(Setting("loss_id", "", "which custom loss"),),
        sum_names=(*graph.metrics, _COUNT, _FAILED),
        metrics=request.metrics,
        wide=True,
    )


class _Request:
    """The computation of one request in one process, perhaps in several threads."""

    def __init__(self, graph: Graph, limits: Limits) -> None:
        self._graph = graph
        self._interpreter = Interpreter(graph, limits)
        self._lock = threading.Lock()
        self._failure: CustomLossFailed | None = None

    def compute(
        self,
        logprobs: Tensor,
        inputs: Mapping[str, Tensor],
        settings: Settings,
        layout: DatumLayout,
    ) -> LossResult:
        """Σ over datums of the client's function.

        `logprobs` [E]: the function gets each datum's part of them as [N] or [N, K], and the
        datum's other inputs in the client's shapes.

        A failure is kept for `metrics`, and the micro-batch counts as zero: the other ranks are
        in the middle of the same operation, and none may leave it alone.
        """
        try:
            value, gradient, sums = self._differentiate(logprobs, layout)
        except CustomLossFailed as error:
            with self._lock:
                self._failure = self._failure or error
            value, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(logprobs)
            sums = [*([0.0] * len(self._graph.metrics)), float(layout.datums), 1.0]
        # Its value is `value`, and its derivative by the logprobs is `gradient`.
        linear = (logprobs.double() * gradient).sum()
        loss = (linear - linear.detach()) + value.to(logprobs.device)
        totals = torch.tensor(sums, dtype=torch.float64, device=logprobs.device)
        return LossResult(loss=loss, sums=tuple(totals))

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        if sums[_FAILED]:
            raise self._failure or self._interpreter.failed("the failure was on another rank")
        count = sums[_COUNT]
        return {
            name: sums[name] / count if name.endswith(":mean") else sums[name]
            for name in self._graph.metrics
        }

    def _differentiate(
        self, logprobs: Tensor, layout: DatumLayout
    ) -> tuple[Tensor, Tensor, list[float]]:
        """Return the value, float64; its derivative by the logprobs [E]; the sums."""
        wanted, rank = logprobs.requires_grad, self._graph.inputs[0].rank
        leaves: list[Tensor] = []
        results: list[Result] = []
        with torch.set_grad_enabled(wanted):
            pieces = logprobs.detach().split(layout.sizes)
            for number, (piece, width) in enumerate(zip(pieces, layout.widths, strict=True)):
                if (2 if width else 1) != rank:
                    raise self._interpreter.failed(
                        f"it was declared for logprobs of rank {rank}, not for the rank of "
                        "these target_tokens"
                    )
                shaped = piece.clone().reshape(-1, width) if width else piece.clone()
                leaf = shaped.requires_grad_(wanted)
                others = [layout.arrays[each.name][number] for each in self._graph.inputs[1:]]
                result = self._interpreter.run([leaf, *others])
                if wanted and not result.loss.requires_grad:
                    raise self._interpreter.failed("its loss does not depend on the logprobs")
                leaves.append(leaf)
                results.append(result)
            values = torch.stack([result.loss.double() for result in results])
            gradient = self._gradient(values, leaves) if wanted else torch.zeros_like(logprobs)
        sums = [sum(result.metrics[name] for result in results) for name in self._graph.metrics]
        return values.detach().sum(), gradient, [*sums, float(layout.datums), 0.0]

    def _gradient(self, values: Tensor, leaves: list[Tensor]) -> Tensor:
        failed = self._interpreter.failed
        try:
            found = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
        except RuntimeError as error:
            raise failed(f"its gradient: {describe(error).splitlines()[0]}"[:600]) from error
        if any(each is None for each in found):
            raise failed("its loss does not depend on the logprobs of every datum")
        gradient = torch.cat([each.reshape(-1) for each in found])
        if not bool(torch.isfinite(gradient).all()):
            raise failed(
                "its derivative by the logprobs is not finite, though the loss is; look for a "
                "square root, a logarithm or a division at 0 behind a where"
            )
        return gradient


LOSS = DefinedLoss("custom", custom_loss)
