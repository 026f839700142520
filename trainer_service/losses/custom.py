"""The loss "custom": a function of one datum that the client traced and registered.

A separate process with bounded memory and time computes and differentiates the function, so errors
of a client's graph never reach a gradient of the model. The result is that of the SDK's three
passes (forward, derivative, weighted cross-entropy), in one."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from tandem.custom_losses import read_custom_loss
from tandem.custom_losses.process import Limits, LossProcess
from tandem.errors import CustomLossFailed, UnknownLoss
from trainer_service.losses.base import (
    DatumLayout,
    DefinedLoss,
    Input,
    Loss,
    LossResult,
    LossSettings,
    Setting,
)

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.custom_losses import Graph

_COUNT = "datums"


def custom_loss(definition: bytes, *, process: LossProcess, limits: Limits | None = None) -> Loss:
    """Return the loss of one request from the JSON body of create_custom_loss.

    Raises `UnknownLoss` without a definition, `MalformedPayload` or `CustomLossInvalid`."""
    if not definition:
        raise UnknownLoss(
            "the loss 'custom' came without its definition: create one with "
            "ServiceClient.create_custom_loss and pass its handle to forward_backward_custom"
        )
    graph = read_custom_loss(definition)
    request = _LossRequest(graph, definition, process, limits or Limits())
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
        sum_names=(*graph.metrics, _COUNT),
        metrics=request.metrics,
        failure=request.failure,
        wide=True,
    )


class _LossRequest:
    def __init__(
        self, graph: Graph, definition: bytes, process: LossProcess, limits: Limits
    ) -> None:
        self._graph = graph
        self._definition = definition
        self._process = process
        self._limits = limits
        self._seconds = 0.0  # over all datums
        self._lock = threading.Lock()
        self._failure = ""

    def compute(
        self,
        logprobs: Tensor,
        inputs: Mapping[str, Tensor],
        settings: LossSettings,
        layout: DatumLayout,
    ) -> LossResult:
        """Σ over datums of the client's function.

        The function gets each datum's `logprobs` as [N] or [N, K], with the datum's other inputs.
        After a failure the rest of the request counts as zero, and `failure` returns the reason. An
        error raised here would leave the other ranks in the operation's collectives."""
        try:
            value, gradient, sums = self._evaluate(logprobs, layout)
        except CustomLossFailed as error:
            with self._lock:
                self._failure = self._failure or error.message
            value, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(logprobs)
            sums = [0.0] * len(self._graph.metrics)
        # The term `linear - linear.detach()` is 0 and has the gradient `gradient`.
        linear = (logprobs.double() * gradient).sum()
        loss = (linear - linear.detach()) + value.to(logprobs.device)
        sums.append(layout.datums)
        totals = torch.tensor(sums, dtype=torch.float64, device=logprobs.device)
        return LossResult(loss=loss, sums=tuple(totals))

    def failure(self) -> str:
        return self._failure

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        count = sums[_COUNT]
        return {
            name: sums[name] / count if name.endswith(":mean") else sums[name]
            for name in self._graph.metrics
        }

    def _failed(self, sentence: str) -> CustomLossFailed:
        return CustomLossFailed(f"the custom loss {self._graph.name!r} failed: {sentence}")

    def _evaluate(
        self, logprobs: Tensor, layout: DatumLayout
    ) -> tuple[Tensor, Tensor, list[float]]:
        """Return the value (float64), its derivative by the logprobs [E], and the sums."""
        if self._failure:
            raise CustomLossFailed(self._failure)
        rank, others = self._graph.inputs[0].rank, self._graph.inputs[1:]
        pieces = logprobs.detach().cpu().split(layout.sizes)
        datums = []
        for number, (piece, width) in enumerate(zip(pieces, layout.widths, strict=True)):
            if (2 if width else 1) != rank:
                raise self._failed(
                    f"it was declared for logprobs of rank {rank}, not for the rank of these "
                    "target_tokens"
                )
            shaped = piece.reshape(-1, width) if width else piece
            datums.append([shaped, *(layout.arrays[each.name][number] for each in others)])
        found = self._process.evaluate(
            self._graph,
            self._definition,
            datums,
            gradient=logprobs.requires_grad,
            limits=self._limits,
            used=self._seconds,
        )
        self._seconds += found.seconds
        gradient = torch.zeros_like(logprobs)
        if logprobs.requires_grad:
            flat = torch.cat([each.reshape(-1) for each in found.gradients])
            gradient = flat.to(logprobs.device)
        return found.losses.sum(), gradient, list(found.metrics)


LOSS = DefinedLoss("custom", partial(custom_loss, process=LossProcess()))
