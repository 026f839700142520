"""Scores prompt tokens inside vLLM's worker, during the request's prefill.

vLLM's own prompt logprobs support no chosen targets, draws or suffix, and hold the logits of a
whole prompt. On a CPU (0.32) they crash the engine if an adapter changes the output head. Here
logits are computed in chunks of at most `_LOGIT_BYTES`. A token is scored from the state one
position before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from sampler_service.engine import Float32Array, PromptScores, PromptScoring, TopK
from sampler_service.vllm.adapter_internals import head_of
from sampler_service.vllm.internals import RequestStep

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

SCORING_ARGUMENT = "tandem_scores"
"""Key of a request's scoring in vLLM's `extra_args`."""
EMPTY_LOGPROB = -99999.0
_LOGIT_BYTES = 64 * 2**20


class PromptScorer:
    """Use: `scorer.begin_scoring("7", scoring, prompt=[5, 2, 9])`, then a request with the extra
    arguments `{"tandem_scores": "7"}`, and at its end `scorer.take_scores("7")`."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner
        self._open: dict[str, _ScoreTable] = {}
        self._complete: dict[str, _ScoreTable] = {}

    def begin_scoring(self, key: str, scoring: PromptScoring, *, prompt: list[int]) -> None:
        self._open[key] = _ScoreTable(scoring, prompt)

    def take_scores(self, key: str) -> PromptScores:
        return self._complete.pop(key).scores()

    def discard(self, key: str) -> None:
        self._open.pop(key, None)
        self._complete.pop(key, None)

    def after_step(self, hidden_states: torch.Tensor, requests: Iterable[RequestStep]) -> None:
        """Score a step's prompt tokens, from the `hidden_states` [tokens, hidden] of all
        requests."""
        if self._open:
            for request in requests:
                self._score(request, hidden_states)

    def _score(self, request: RequestStep, hidden_states: torch.Tensor) -> None:
        key = str(request.arguments.get(SCORING_ARGUMENT, ""))
        if (table := self._open.get(key)) is None:
            return
        runner = self._runner
        # The state at one position scores the token at the next.
        first = max(table.start, request.before + 1)
        end = min(table.length, request.before + request.tokens + 1)
        rows = max(1, _LOGIT_BYTES // (4 * runner.model_config.get_vocab_size()))
        if hasattr(runner, "lora_manager"):  # its head tables have this many rows
            rows = min(rows, runner.max_num_reqs)
        for begin in range(first, end, rows):
            stop = min(begin + rows, end)
            at = request.row + begin - 1 - request.before
            with head_of(runner, request.adapter, rows=stop - begin):
                logits = runner.model.compute_logits(hidden_states[at : at + stop - begin])
            table.fill(logits.float(), begin=begin)
        if end == table.length:
            self._complete[key] = self._open.pop(key)


class _ScoreTable:
    def __init__(self, scoring: PromptScoring, prompt: list[int]) -> None:
        assert scoring.first_computed is not None
        self._prompt = prompt
        self.length = length = len(prompt)
        self.start = scoring.first_computed
        self._scoring = scoring
        own = scoring.first is not None
        self._logprobs = np.full(length, np.nan, np.float32) if own else None
        self._topk = _empty(length, scoring.topk) if own and scoring.topk else None
        self._targets = np.zeros(len(scoring.target_ids), np.float32)
        self._draws = _empty(length - 1, scoring.draws) if scoring.draws else None
        if scoring.draws:
            # One random number per cell, independent of batching.
            self._uniform = np.random.default_rng(scoring.draw_seed).random(
                (length - 1, scoring.draws)
            )

    def scores(self) -> PromptScores:
        return PromptScores(
            logprobs=self._logprobs,
            topk=self._topk,
            targets=self._targets if len(self._targets) else None,
            draws=self._draws,
        )

    def fill(self, logits: torch.Tensor, *, begin: int) -> None:
        """Fill in scores from the logits [rows, vocabulary] from `begin` on."""
        end = begin + len(logits)
        logprobs = logits.log_softmax(-1)
        first = self._scoring.first
        if self._logprobs is not None and first is not None and end > first:
            skip = max(first - begin, 0)
            own = self._prompt[begin + skip : end]
            picked = torch.tensor(own, device=logits.device).unsqueeze(1)
            self._logprobs[begin + skip : end] = _numpy(logprobs[skip:].gather(1, picked))[:, 0]
            if self._topk is not None:
                best = logprobs[skip:].topk(self._scoring.topk, dim=-1)
                self._topk.token_ids[begin + skip : end] = best.indices.cpu().numpy()
                self._topk.logprobs[begin + skip : end] = _numpy(best.values)
        self._fill_targets(logprobs, begin=begin, end=end)
        if self._draws is not None:
            self._draw(logits, logprobs, begin=begin, end=end)

    def _fill_targets(self, logprobs: torch.Tensor, *, begin: int, end: int) -> None:
        positions = self._scoring.target_positions
        low, high = (int(np.searchsorted(positions, edge)) for edge in (begin, end))
        if low == high:
            return
        rows = torch.from_numpy(positions[low:high] - begin).to(logprobs.device)
        ids = torch.from_numpy(self._scoring.target_ids[low:high]).to(logprobs.device)
        self._targets[low:high] = _numpy(logprobs[rows, ids])

    def _draw(self, logits: torch.Tensor, logprobs: torch.Tensor, *, begin: int, end: int) -> None:
        assert self._draws is not None
        k, temperature = self._scoring.draws, self._scoring.draw_temperature
        if temperature == 0:
            drawn = logits.argmax(-1, keepdim=True).expand(-1, k)
        else:
            # Inverse transform sampling. Float32 sums would lose a large vocabulary's tail.
            sums = (logits.double() / temperature).softmax(-1).cumsum(-1)
            uniform = torch.from_numpy(self._uniform[begin - 1 : end - 1]).to(logits.device)
            drawn = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
            drawn = drawn.clamp_max(logits.shape[-1] - 1)
        self._draws.token_ids[begin - 1 : end - 1] = drawn.cpu().numpy()
        self._draws.logprobs[begin - 1 : end - 1] = _numpy(logprobs.gather(1, drawn))


def _numpy(values: torch.Tensor) -> Float32Array:
    array: Float32Array = values.cpu().numpy()
    return array


def _empty(length: int, k: int) -> TopK:
    return TopK(
        token_ids=np.zeros((length, k), np.int32),
        logprobs=np.full((length, k), EMPTY_LOGPROB, np.float32),
    )
