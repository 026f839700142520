"""The logprobs of sampled tokens, as arrays.

vLLM appends each value to Python lists, and a request may ask for millions."""

from __future__ import annotations

import numpy as np
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.logprobs import LogprobsProcessor

from sampler_service.engine import Float32Array, Int32Array, Int64Array, TopK
from sampler_service.vllm.prompt_scoring import EMPTY_LOGPROB


class SampledLogprobs:
    """The logprobs of one sample: a row per token, with the token first, then the `topk` likeliest.

    Bytes grow without an object per row."""

    def __init__(self, topk: int) -> None:
        self._topk = topk
        self._own = bytearray()
        self._ids = bytearray()
        self._values = bytearray()

    def append(self, ids: Int32Array | Int64Array, values: Float32Array) -> None:
        """Add rows [n, columns]. Another request of the batch may need more columns."""
        self._own += values[:, 0].tobytes()
        if self._topk:
            # The second model runner has 64-bit ids.
            self._ids += ids[:, 1 : self._topk + 1].astype(np.int32).tobytes()
            self._values += values[:, 1 : self._topk + 1].tobytes()

    def own(self, start: int) -> Float32Array:
        """Return the logprobs [n] of the tokens from `start` on."""
        return np.frombuffer(self._own, np.float32)[start:].copy()

    def topk(self, start: int) -> TopK | None:
        """Return the likeliest tokens [n, k] from `start` on, or None.

        Cells of filtered tokens are empty."""
        if not self._topk:
            return None
        ids = np.frombuffer(self._ids, np.int32).reshape(-1, self._topk)[start:]
        values = np.frombuffer(self._values, np.float32).reshape(-1, self._topk)[start:]
        allowed = np.isfinite(values)
        return TopK(
            token_ids=np.where(allowed, ids, np.int32(0)),
            logprobs=np.where(allowed, values, np.float32(EMPTY_LOGPROB)),
        )


class SampledLogprobsProcessor(LogprobsProcessor):  # type: ignore[misc]
    """Replaces vLLM's processor, which appends to lists."""

    def __init__(self, topk: int) -> None:
        super().__init__(
            tokenizer=None,
            logprobs=SampledLogprobs(topk),
            prompt_logprobs=None,
            cumulative_logprob=None,
            num_logprobs=topk,
            num_prompt_logprobs=None,
        )

    def update_from_output(self, output: EngineCoreOutput) -> None:
        rows = output.new_logprobs
        if rows is not None:
            self.logprobs.append(rows.logprob_token_ids, rows.logprobs)
