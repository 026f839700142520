"""The seam between us and an inference engine: plain arguments, no types of a library.

`vllm_engine.VllmEngine` is the implementation; tests of the scheduler inject another one. An
engine belongs to one thread: whoever made it steps it, and nobody else calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tandem.errors import LoadFailed

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]


class WeightsTouched(LoadFailed):
    """A load failed after it had begun to change the engine's weights: nothing may be sampled
    until a load has succeeded."""


@dataclass(frozen=True)
class EngineFacts:
    """What an engine is. `max_length` counts prompt and sampled tokens together;
    `end_tokens` are the model's end-of-sequence tokens."""

    vocabulary: int
    max_length: int
    dtype: str
    device: str
    name: str
    end_tokens: tuple[int, ...]


@dataclass(frozen=True)
class EngineRequest:
    """One prompt, sampled `num_samples` times.

    Literal example: `EngineRequest(id="op-1", prompt=[20, 30], num_samples=8, max_tokens=4,
    temperature=1.0, top_k=-1, top_p=1.0, seed=7, stop_token_ids=(1,))`. Sample i with seed s
    is a function of (s, i) and the weights alone; without a seed it is random. Temperature 0
    is greedy. `topk` alternatives are recorded per sampled token, `prompt_topk` per prompt token.
    """

    id: str
    prompt: list[int]
    num_samples: int
    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    topk: int = 0
    prompt_logprobs: bool = False
    prompt_topk: int = 0


@dataclass(frozen=True)
class TopK:
    """The likeliest tokens per position. `token_ids` and `logprobs` are [length, k]; a cell
    without a token has id 0 and logprob -99999."""

    token_ids: Int32Array
    logprobs: Float32Array


@dataclass(frozen=True)
class SampledTokens:
    """One sample. `tokens` and `logprobs` are [n]; a stop token is among them. The logprobs
    are those of the distribution that was sampled from, after temperature, top_k and top_p;
    those of a greedy sample are at temperature 1. `stopped` is False when the length ended it."""

    tokens: Int32Array
    logprobs: Float32Array
    stopped: bool
    topk: TopK | None = None


@dataclass(frozen=True)
class EngineResult:
    """All samples of a request. `prompt_logprobs` is [prompt], at temperature 1, with NaN at
    position 0. `cached_tokens` counts prompt tokens that the prefix cache held."""

    id: str
    samples: tuple[SampledTokens, ...]
    prompt_logprobs: Float32Array | None = None
    prompt_topk: TopK | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class LoadedWeights:
    """What a load did: the engine's own parameters that got a value, and those that did not."""

    loaded: frozenset[str]
    missing: frozenset[str]
    bytes: int = field(default=0)


class Engine(Protocol):
    """An engine with one set of weights in it."""

    @property
    def facts(self) -> EngineFacts: ...

    def add(self, request: EngineRequest) -> None:
        """Admits a request. Its id must not be in use."""

    def step(self) -> list[EngineResult]:
        """Computes the next token of everything admitted; returns the requests that ended."""

    def abort(self, ids: Sequence[str]) -> None:
        """Forgets requests; they are never returned. Unknown ids are passed over."""

    @property
    def running(self) -> int:
        """Requests admitted and not ended."""

    def load(self, directory: Path) -> LoadedWeights:
        """Replaces the weights by those in a directory of safetensors, in place.

        Only when nothing runs. Raises `WeightsTouched`; afterwards only a load is allowed.
        """

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prompts. False when the engine did not do so."""

    def score(self, tokens: Sequence[int]) -> Float32Array:
        """Logprobs [T-1] of tokens[1:] at temperature 1. Only when nothing runs."""
