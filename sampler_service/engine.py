"""The seam between us and an inference engine: plain arguments, no types of a library.

`vllm_engine.VllmEngine` is the implementation; tests of the scheduler inject another one. An
engine belongs to one thread: whoever made it steps it, and nobody else calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from tandem.errors import LoadFailed, TandemError

if TYPE_CHECKING:
    from sampler_service.form_compiler import CompiledForm

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class WeightsTouched(LoadFailed):
    """A load failed after it had begun to change the engine's weights: nothing may be sampled
    until a load has succeeded."""


@dataclass(frozen=True)
class EngineFacts:
    """What an engine is. `max_length` counts prompt and sampled tokens together;
    `end_tokens` are the model's end-of-sequence tokens. `max_lora_rank` 0: no adapters;
    else `max_adapters` of them fit into it."""

    vocabulary: int
    max_length: int
    dtype: str
    device: str
    name: str
    end_tokens: tuple[int, ...]
    max_lora_rank: int = 0
    max_adapters: int = 0


@dataclass(frozen=True)
class PromptScoring:
    """What is asked about the tokens of a prompt. A position p from 1 on is scored: the
    logprobs, at temperature 1, of tokens in the place of prompt[p], given those before it.

    `first` is the first position whose own token is scored, None for none; `topk` likeliest
    tokens are listed from `first` on. `target_ids` [m] are scored at `target_positions` [m],
    which ascend. With `draws` k, k tokens are drawn at every position with `draw_temperature`
    (0: the likeliest), by `draw_seed` if there is one.
    """

    first: int | None = None
    topk: int = 0
    target_positions: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    target_ids: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    draws: int = 0
    draw_temperature: float = 1.0
    draw_seed: int | None = None

    @property
    def start(self) -> int | None:
        """The first position that anything asks for: the prefix cache may serve what lies more
        than one before it. None when nothing is asked."""
        starts = [self.first] if self.first is not None else []
        starts += [int(self.target_positions[0])] if len(self.target_positions) else []
        starts += [1] if self.draws else []
        return min(starts, default=None)


@dataclass(frozen=True)
class EngineRequest:
    """One prompt, sampled `num_samples` times.

    Literal example: `EngineRequest(id="op-1", prompt=[20, 30], num_samples=8, max_tokens=4,
    temperature=1.0, top_k=-1, top_p=1.0, seed=7, stop_token_ids=(1,))`. Sample i with seed s
    is a function of (s, i) and the weights alone; without a seed it is random. Temperature 0
    is greedy. `topk` alternatives are recorded per sampled token. `adapter` is the name of one
    that was added to the engine, None for the loaded weights alone.
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
    scoring: PromptScoring | None = None
    adapter: str | None = None
    form: CompiledForm | None = None
    streamed: bool = False

    @property
    def distinct_samples(self) -> int:
        """Greedy samples of one prompt are all alike: one is computed."""
        return self.num_samples if self.temperature > 0 else 1


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
class PromptScores:
    """The answer to a `PromptScoring`, each part None when it was not asked for. `logprobs` is
    [prompt], with NaN where nothing was scored; `topk` is [prompt, k]; `targets` is [m]; `draws`
    is [prompt - 1, k], whose row i is about position i + 1."""

    logprobs: Float32Array | None = None
    topk: TopK | None = None
    targets: Float32Array | None = None
    draws: TopK | None = None


@dataclass(frozen=True)
class EngineResult:
    """All samples of a request. `cached_tokens` counts prompt tokens that the prefix cache
    held when the first sample began. With a `failure` there are no samples."""

    id: str
    samples: tuple[SampledTokens, ...]
    prompt: PromptScores | None = None
    cached_tokens: int = 0
    failure: TandemError | None = None


@dataclass(frozen=True)
class EngineDelta:
    """The tokens that one sample of a streamed request got in a step. `new.stopped` says how the
    sample ended, if it is `finished`. Of a greedy request only sample 0 is told."""

    id: str
    index: int
    new: SampledTokens
    finished: bool


@dataclass(frozen=True)
class Step:
    """What a step brought: the requests that ended, and the deltas of those that are streamed,
    the last ones of a request that ends among them."""

    results: list[EngineResult] = field(default_factory=list)
    deltas: list[EngineDelta] = field(default_factory=list)


@dataclass(frozen=True)
class LoadedWeights:
    """What a load did: the engine's own parameters that got a value, and those that did not."""

    loaded: frozenset[str]
    missing: frozenset[str]
    bytes: int = field(default=0)


class Engine(Protocol):
    """An engine with one set of weights in it, and adapters beside them."""

    @property
    def facts(self) -> EngineFacts: ...

    def add(self, request: EngineRequest) -> None:
        """Admits a request. Its id must not be in use."""

    def step(self) -> Step:
        """Computes the next token of everything admitted."""

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

    def add_adapter(self, name: str, directory: Path) -> None:
        """Puts an adapter beside the weights; others may run meanwhile. `load` takes all out.

        Raises `LoadFailed`, and then nothing has changed.
        """

    def remove_adapter(self, name: str) -> None:
        """Takes an adapter out, whose requests have all ended."""
