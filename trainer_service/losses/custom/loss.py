"""The loss that a request brought with it, as all other losses are: sums over datums.

The client's function is computed once for each datum on a leaf of its own, outside the model's
graph, and differentiated there; what goes on into the model is its value and its derivative by
the logprobs. So what a graph does wrong is found before it touches a gradient of the model, and
the result is that of the SDK's own way, forward, derivative, weighted cross-entropy, in one pass.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.custom_loss import Graph, read_custom_loss
from tandem.errors import CustomLossFailed
from trainer_service.losses.base import Input, Loss, LossResult, Setting, Settings
from trainer_service.losses.custom.interpreter import Interpreter, Limits, Result
from trainer_service.losses.layout import Layout

_COUNT = "datums"
_FAILED = "failed"


def custom_loss(definition: bytes, limits: Limits | None = None) -> Loss:
    """The loss of a JSON body of create_custom_loss, for one request.

    Raises `MalformedPayload` or `CustomLossInvalid`. Its `metrics` raises `CustomLossFailed`
    when it could not be computed for some datum, on whichever rank that was.
    """
    graph = read_custom_loss(definition)
    run = _Request(graph, limits or Limits())
    return Loss(
        name="custom",
        compute=run.compute,
        inputs=tuple(
            Input(
                name=each.name,
                meaning="what the client's function makes of it",
                shape="free",
                required=True,
                finite=False,
                rank=each.rank,
            )
            for each in graph.inputs[1:]
        ),
        settings=(Setting(name="loss_id", default="", meaning="which custom loss"),),
        sum_names=(*graph.metrics, _COUNT, _FAILED),
        metrics=run.metrics,
        wide=True,
    )


class _Request:
    """What one request does with its graph, in one process, perhaps in several lanes."""

    def __init__(self, graph: Graph, limits: Limits) -> None:
        self._graph = graph
        self._interpreter = Interpreter(graph, limits)
        self._lock = threading.Lock()
        self._failure: CustomLossFailed | None = None

    def compute(
        self, logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Settings, layout: Layout
    ) -> LossResult:
        """Σ over datums of the client's function. `logprobs` [E]; a datum's [N] or [N, K] of
        them, and its other inputs in the client's shapes, are what the function is given.

        A failure is kept for `metrics` and makes the micro-batch count nothing: other ranks
        are in the middle of the same operation, and none may leave it alone.
        """
        try:
            value, gradient, sums = self._differentiate(logprobs, layout)
        except CustomLossFailed as error:
            with self._lock:
                self._failure = self._failure or error
            zeros = [0.0] * len(self._graph.metrics)
            value, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(logprobs)
            sums = [*zeros, float(layout.datums), 1.0]
        # Its value is `value`, and its derivative by the logprobs is `gradient`.
        linear = (logprobs.double() * gradient).sum()
        loss = (linear - linear.detach()) + value.to(logprobs.device)
        totals = torch.tensor(sums, dtype=torch.float64, device=logprobs.device)
        return LossResult(loss=loss, sums=tuple(totals))

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        if sums[_FAILED]:
            raise self._failure or CustomLossFailed(
                f"the custom loss {self._graph.name!r} failed on another rank"
            )
        count = sums[_COUNT]
        return {
            name: sums[name] / count if name.endswith(":mean") else sums[name]
            for name in self._graph.metrics
        }

    def _differentiate(
        self, logprobs: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor, list[float]]:
        """The value, float64; its derivative by the logprobs [E]; the sums of the metrics."""
        wanted = logprobs.requires_grad
        names = [each.name for each in self._graph.inputs]
        leaves: list[Tensor] = []
        results: list[Result] = []
        with torch.set_grad_enabled(wanted):
            pieces = logprobs.detach().split(layout.sizes)
            for number, (piece, width) in enumerate(zip(pieces, layout.widths, strict=True)):
                self._check_rank(width)
                shaped = piece.clone().reshape(-1, width) if width else piece.clone()
                leaf = shaped.detach().requires_grad_(wanted)
                others = [layout.arrays[name][number] for name in names[1:]]
                result = self._interpreter.run([leaf, *others])
                if wanted and not result.loss.requires_grad:
                    raise self._failed("its loss does not depend on the logprobs")
                if not bool(torch.isfinite(result.loss)):
                    raise self._not_finite(f"its loss is {result.loss.item()}", [leaf, *others])
                leaves.append(leaf)
                results.append(result)
            values = torch.stack([result.loss.double() for result in results])
            gradient = self._gradient(values, leaves) if wanted else torch.zeros_like(logprobs)
        sums = [sum(result.metrics[name] for result in results) for name in self._graph.metrics]
        return values.detach().sum(), gradient, [*sums, float(layout.datums), 0.0]

    def _gradient(self, values: Tensor, leaves: list[Tensor]) -> Tensor:
        try:
            found = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
        except RuntimeError as error:
            raise self._failed(f"its gradient: {str(error).splitlines()[0]}"[:600]) from error
        if any(each is None for each in found):
            raise self._failed("its loss does not depend on the logprobs of every datum")
        gradient = torch.cat([each.reshape(-1) for each in found])
        if not bool(torch.isfinite(gradient).all()):
            raise self._failed(
                "its derivative by the logprobs is not finite, though the loss is; look for a "
                "square root, a logarithm or a division at 0 behind a where"
            )
        return gradient

    def _check_rank(self, width: int) -> None:
        rank = 2 if width else 1
        if rank != self._graph.inputs[0].rank:
            raise self._failed(
                f"it was declared for logprobs of rank {self._graph.inputs[0].rank}, and the "
                f"target_tokens have rank {rank}"
            )

    def _not_finite(self, sentence: str, inputs: list[Tensor]) -> CustomLossFailed:
        node = self._interpreter.first_not_finite(inputs)
        hint = f"; the first value that is not finite comes from {node}" if node else ""
        return self._failed(sentence + hint)

    def _failed(self, sentence: str) -> CustomLossFailed:
        return CustomLossFailed(f"the custom loss {self._graph.name!r} failed: {sentence}")
