"""Custom losses as the SDK sends them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tests.support.custom_losses import request_body, traced


def _by_entry(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    ratio = (logprobs - old_logprobs).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -gain.sum(), {"custom/ratio:mean": ratio.mean()}


def _by_sequence(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    ratio = (logprobs - old_logprobs).mean().exp()
    return -ratio * advantages.mean(), {"custom/ratio:mean": ratio}


DEFINITIONS: dict[str, bytes] = {
    f"custom, {name}": request_body(traced(fn, logprobs=1, old_logprobs=1, advantages=1))
    for name, fn in {"by entry": _by_entry, "by sequence": _by_sequence}.items()
}
"""Bodies of create_custom_loss, by request name."""
