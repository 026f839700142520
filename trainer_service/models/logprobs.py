"""Log probabilities of targets from hidden states, without the logits of a whole micro-batch.

A body makes hidden states, and a tail makes logits of a chunk of rows at a time. For gradients, the
backward pass makes a chunk's logits again, or, for a loss by entry (`Loss.by_entry`), the gradients
are made with the log probabilities."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

_TOLERANCE = 1e-4
LogitsOf = Callable[["Tensor"], "Tensor"]
"""Hidden states [N, hidden] to logits [N, vocabulary]."""
GradientOf = Callable[["Tensor"], "Tensor"]
"""Log probabilities [e] to the gradient [e] of a loss at them."""


class _HiddenStates:
    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


class _Body(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """Replaces a model's body and returns given hidden states."""

    def __init__(self, body: nn.Module, hidden: Tensor) -> None:
        super().__init__()
        object.__setattr__(self, "_body", body)  # not a module of this one
        self._hidden = hidden

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._body, name)

    def forward(self, *given: object, **named: object) -> _HiddenStates:
        return _HiddenStates(self._hidden)


def divide(model: nn.Module) -> tuple[LogitsOf, dict[str, nn.Module]]:
    """Make `model(…)` return its last hidden states [B, T, hidden]. Only for a model that
    `comes_apart`.

    Returns the function that makes logits of them, with the parts of the model that it uses, by
    name. It is the model's own forward with another body, so it also applies a softcap or a factor.
    """
    prefix = str(model.base_model_prefix)
    body = model._modules[prefix]
    undivided = _twin(model)

    def logits_of(hidden: Tensor) -> Tensor:
        tail = _twin(undivided)
        tail._modules = {**undivided._modules, prefix: _Body(body, hidden[None])}
        # Not called as a module, because hooks belong to the whole model.
        logits: Tensor = tail.forward(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def hidden_states(**inputs: object) -> Tensor:
        hidden: Tensor = body(**inputs).last_hidden_state
        return hidden

    model.forward = hidden_states
    return logits_of, {name: part for name, part in model.named_children() if name != prefix}


def return_logits(model: nn.Module) -> None:
    """Make `model(…)` return its logits [B, T, vocabulary]."""
    whole = model.forward

    def logits(**inputs: object) -> Tensor:
        found: Tensor = whole(**inputs).logits
        return found

    model.forward = logits


def comes_apart(model: nn.Module) -> bool:
    """True if the divided model makes the whole model's logits of a short sequence."""
    if getattr(model, "base_model_prefix", "") not in model._modules:
        return False  # no part makes hidden states
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = (torch.arange(5) % vocabulary)[None].to(next(model.parameters()).device)
    with torch.no_grad():
        wanted = model(input_ids=tokens, use_cache=False).logits[0]
        logits_of, _ = divide(model)
        try:
            found = logits_of(model(input_ids=tokens, use_cache=False)[0])
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False
        finally:
            del model.forward  # restores the class's method
    return _agree(found, wanted)


def _twin(model: nn.Module) -> nn.Module:
    """A model with shared parts. `copy` would recreate a sharded one."""
    twin: nn.Module = object.__new__(type(model))
    twin.__dict__.update(model.__dict__)
    return twin


def _agree(found: Tensor, wanted: Tensor) -> bool:
    scale = max(1.0, float(wanted.abs().max()))
    return float((found - wanted).abs().max()) <= _TOLERANCE * scale


class ChunkedLogprobs:
    """Log probabilities in chunks of `rows` rows. Thread-safe.

    Example: `ChunkedLogprobs(logits_of, parameters, rows=512)(hidden, targets)`. `parameters`
    returns the trainable parameters that `logits_of` computes with. `compiled` replaces torch's
    log-softmax, with other bits."""

    def __init__(
        self,
        logits_of: LogitsOf,
        parameters: Callable[[], Sequence[nn.Parameter]],
        *,
        rows: int,
        compiled: CompiledLogSoftmax | None = None,
    ) -> None:
        self._logits_of = logits_of
        self._parameters = parameters
        self._compiled = compiled
        self.rows = rows

    def __call__(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The log probabilities [N, K], float32, of `targets` [N, K] after `hidden` [N, hidden]."""
        if len(hidden) <= self.rows:
            return self.of_chunk(hidden, targets)
        if not torch.is_grad_enabled():
            return self._of_chunks(hidden, targets)
        found: Tensor = _MadeAgain.apply(self, targets, hidden, *self._parameters())
        return found

    def with_gradients(
        self, hidden: Tensor, targets: Tensor, *, select: Tensor | None, gradient_of: GradientOf
    ) -> tuple[Tensor, Tensor]:
        """For a loss by entry: the log probabilities [e] of the targets that `select` picks out of
        the flat [N·K], and a number with the loss's gradient."""
        logprobs, carrier = _MadeAtOnce.apply(
            self, targets, select, gradient_of, hidden, *self._parameters()
        )
        return logprobs, carrier

    def of_chunk(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if self._compiled is not None:
            return self._compiled(self._logits_of(hidden), targets)
        return self.of_vocabulary(hidden).gather(-1, targets)

    def of_vocabulary(self, hidden: Tensor) -> Tensor:
        """The log probabilities [n, vocabulary] of all tokens after at most `rows` rows."""
        return torch.log_softmax(_widened(self._logits_of(hidden)), dim=-1)

    def chunks(self, rows: int) -> Iterator[slice]:
        for start in range(0, rows, self.rows):
            yield slice(start, min(rows, start + self.rows))

    def _of_chunks(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return torch.cat(
            [self.of_chunk(hidden[part], targets[part]) for part in self.chunks(len(hidden))]
        )


def _at_least_float32(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(_at_least_float32(tensor))


class CompiledLogSoftmax:
    """Log probabilities of targets, from logits, by compiled code.

    It keeps the logits alone for the gradients, and makes no float32 tensor of their size. Compiled
    code does not depend on the number of targets. A single row, which a compiler takes for a
    constant, is computed by the plain functions."""

    def __init__(self) -> None:
        self._normalisers = torch.compile(_normalisers, dynamic=True)
        self._gradient = torch.compile(_gradient, dynamic=True)

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The log probabilities [n, K], at least float32, of `targets` [n, K]."""
        logprobs: Tensor = _OfLogits.apply(self, logits, targets)
        return logprobs

    def normalisers(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        compute = self._normalisers if len(logits) > 1 else _normalisers
        largest, log_sum = compute(logits)
        return largest, log_sum

    def gradient(self, logits: Tensor, largest: Tensor, log_sum: Tensor, factor: Tensor) -> Tensor:
        compute = self._gradient if len(logits) > 1 else _gradient
        found: Tensor = compute(logits, largest, log_sum, factor)
        return found


def _normalisers(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit [n, 1], and log Σ exp(logit - largest) [n, 1]. Log probabilities subtract
    both from the logit, one after the other, as torch does."""
    wide = _widened(logits)
    largest = wide.amax(-1, keepdim=True)
    return largest, (wide - largest).exp().sum(-1, keepdim=True).log()


def _gradient(logits: Tensor, largest: Tensor, log_sum: Tensor, factor: Tensor) -> Tensor:
    """Probabilities [n, vocabulary] times a factor [n, 1], in the logits' type."""
    return ((_widened(logits) - largest - log_sum).exp() * factor).to(logits.dtype)


class _OfLogits(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, code: CompiledLogSoftmax, logits: Tensor, targets: Tensor) -> Tensor:
        logits = logits.detach()  # compiled code differs for a tensor that needs a gradient
        largest, log_sum = code.normalisers(logits)
        logprobs = _widened(logits.gather(-1, targets)) - largest - log_sum
        ctx.code = code
        ctx.save_for_backward(logits, targets, largest, log_sum, logprobs)
        return logprobs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        """The sum over k of g_k · (1[token = t_k] - p), whose sum at a target is taken before it is
        rounded."""
        logits, targets, largest, log_sum, logprobs = ctx.saved_tensors
        total = gradient.sum(-1, keepdim=True)
        found = ctx.code.gradient(logits.detach(), largest, log_sum, -total)
        at_targets = -logprobs.exp() * total
        for place in range(targets.shape[-1]):  # a token may be several targets
            equal = targets == targets[:, place : place + 1]
            at_targets += equal * gradient[:, place : place + 1]
        return None, found.scatter_(-1, targets, at_targets.to(found.dtype)), None


class _Sums:
    """Gradients of hidden states and parameters, chunk by chunk. Parameters' sums are float32."""

    def __init__(
        self, head: ChunkedLogprobs, hidden: Tensor, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._head, self._hidden, self._parameters = head, hidden, parameters
        self.of_hidden = torch.empty_like(hidden)
        self._totals: list[Tensor | None] = [None] * len(parameters)

    def add_chunk(self, part: slice, targets: Tensor, gradient_of: GradientOf) -> Tensor:
        """Add a chunk's gradients. Return its log probabilities [n, K]."""
        with torch.enable_grad():
            hidden = self._hidden[part].detach().requires_grad_()
            logprobs = self._head.of_chunk(hidden, targets[part])
            gradient = gradient_of(logprobs.detach())
            leaves = [hidden, *self._parameters]
            found = torch.autograd.grad(logprobs, leaves, gradient, allow_unused=True)
        self.of_hidden[part] = found[0]
        for index, more in enumerate(found[1:]):
            if more is None:  # the logits do not depend on it
                continue
            total = self._totals[index]
            if total is None:
                self._totals[index] = more.to(_at_least_float32(more))
            else:
                total.add_(more)
        return logprobs.detach()

    @property
    def of_parameters(self) -> list[Tensor | None]:
        pairs = zip(self._totals, self._parameters, strict=True)
        return [None if total is None else total.to(like.dtype) for total, like in pairs]


def _known(gradient: Tensor, logprobs: Tensor) -> Tensor:
    return gradient


class _MadeAgain(torch.autograd.Function):  # type: ignore[misc]
    """Log probabilities with logits made again for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, head: ChunkedLogprobs, targets: Tensor, hidden: Tensor, *parameters: nn.Parameter
    ) -> Tensor:
        ctx.head, ctx.parameters = head, parameters
        ctx.save_for_backward(hidden, targets)
        return head._of_chunks(hidden, targets)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets = ctx.saved_tensors
        sums = _Sums(ctx.head, hidden, ctx.parameters)
        for part in ctx.head.chunks(len(hidden)):
            of_chunk = gradient[part]
            sums.add_chunk(part, targets, functools.partial(_known, of_chunk))
        return (None, None, sums.of_hidden, *sums.of_parameters)


class _MadeAtOnce(torch.autograd.Function):  # type: ignore[misc]
    """Log probabilities, with the gradients of a loss by entry."""

    @staticmethod
    def forward(
        ctx: Any,
        head: ChunkedLogprobs,
        targets: Tensor,
        select: Tensor | None,
        gradient_of: GradientOf,
        hidden: Tensor,
        *parameters: nn.Parameter,
    ) -> tuple[Tensor, Tensor]:
        sums, width = _Sums(head, hidden, parameters), targets.shape[1]
        wanted = torch.arange(targets.numel(), device=hidden.device) if select is None else select
        logprobs = hidden.new_zeros(len(wanted), dtype=_at_least_float32(hidden))
        for part in head.chunks(len(hidden)):
            first, last = part.start * width, part.stop * width
            if select is not None:
                edges = torch.tensor([first, last], device=hidden.device)
                first, last = torch.searchsorted(wanted, edges).tolist()
            places = wanted[first:last] - part.start * width

            def gradient_of_chunk(
                found: Tensor, first: int = first, last: int = last, places: Tensor = places
            ) -> Tensor:
                logprobs[first:last] = found.reshape(-1)[places]
                gradient = torch.zeros_like(found).reshape(-1)
                gradient[places] = gradient_of(logprobs)[first:last]
                return gradient.view_as(found)

            sums.add_chunk(part, targets, gradient_of_chunk)
        ctx.save_for_backward(sums.of_hidden, *sums.of_parameters)
        ctx.mark_non_differentiable(logprobs)
        return logprobs, logprobs.new_zeros(())

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor, of_carrier: Tensor) -> tuple[Tensor | None, ...]:
        found = [None if each is None else each * of_carrier for each in ctx.saved_tensors]
        return (None, None, None, None, *found)
