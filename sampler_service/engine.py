"""The protocol of an inference engine: plain values, no library types.

`vllm.engine.VllmEngine` implements it, and `service.engine_process.EngineProcess` for an engine in
another process. Only the thread that made an engine may call it. An engine may compute ahead of the
output of `step`. `settle` ends that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sampler_service.structured_output import CompiledGrammar
from tandem.errors import LoadFailed, TandemError
from tandem.v1 import common_pb2

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class WeightsTouched(LoadFailed):
    """A load failed after it began to change the weights. Another load must succeed before
    sampling."""

    type = LoadFailed.type


class EngineState(Enum):
    """An engine's state. It samples only while awake, and loads from there. See docs/sharing.md."""

    AWAKE = "awake"
    LOADING = "loading"
    ASLEEP = "asleep"
    WAKING = "waking"
    FAILED = "failed"


class SleepLevel(IntEnum):
    """The place of a sleeping engine's weights. Its KV cache is given back at both levels."""

    KEEP_WEIGHTS = 1
    """Host memory."""
    DROP_WEIGHTS = 2
    """Nowhere. Adapters are dropped too, and the engine needs a load."""


@dataclass(frozen=True)
class EngineMemory:
    """Memory in use, in bytes.

    On a GPU, `device` counts all processes, and `host` a sleeping engine's weights. On a CPU,
    `device` is the process's resident memory, and `host` 0."""

    device: int
    host: int


@dataclass(frozen=True)
class EngineFacts:
    """An engine's properties.

    `max_length` limits prompt and sampled tokens together. It is below `model_length` if the KV
    cache or a setting is. `max_lora_rank` 0 means no adapters."""

    vocabulary: int
    max_length: int
    model_length: int
    dtype: str
    device: str
    name: str
    end_tokens: tuple[int, ...]
    max_lora_rank: int = 0
    max_adapters: int = 0


@dataclass(frozen=True)
class PromptScoring:
    """The requested scores of a prompt, at temperature 1. They begin at position 1.

    - `first`: the first position to score, or None. From there on, the `topk` likeliest tokens are
      listed too.
    - `target_ids` [m]: tokens to score at `target_positions` [m], which ascend.
    - `draws`: tokens to draw at every position, with `draw_temperature` (0: the likeliest) and
      `draw_seed`."""

    first: int | None = None
    topk: int = 0
    target_positions: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    target_ids: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    draws: int = 0
    draw_temperature: float = 1.0
    draw_seed: int | None = None

    @property
    def first_computed(self) -> int | None:
        """The first position to compute, or None. The prefix cache serves earlier tokens, except
        the last."""
        starts = [self.first] if self.first is not None else []
        starts += [int(self.target_positions[0])] if len(self.target_positions) else []
        starts += [1] if self.draws else []
        return min(starts, default=None)


@dataclass(frozen=True)
class EngineRequest:
    """One prompt, sampled `num_samples` times.

    Example: `EngineRequest(id="op-1", prompt=[20, 30], num_samples=8, max_tokens=4,
    temperature=1.0, top_k=-1, top_p=1.0, seed=7, stop_token_ids=(1,))`.

    With a seed s, sample i depends only on (s, i), the request and the weights. Temperature 0 is
    greedy. `max_tokens` 0 only scores the prompt. `topk` is the number of alternatives per sampled
    token. `adapter` None means the loaded weights alone. A `streamed` request yields one
    `EngineDelta` per sample and step."""

    id: str
    prompt: list[int]
    num_samples: int
    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    topk: int = 0
    scoring: PromptScoring | None = None
    adapter: str | None = None
    grammar: CompiledGrammar | None = None
    streamed: bool = False

    @classmethod
    def to_score(cls, id_: str, tokens: list[int], *, adapter: str | None = None) -> EngineRequest:
        """Return a request for the logprobs of all tokens but the first."""
        return cls(
            id=id_,
            prompt=tokens,
            num_samples=1,
            max_tokens=0,
            temperature=0.0,
            scoring=PromptScoring(first=1),
            adapter=adapter,
        )

    @property
    def distinct_samples(self) -> int:
        """The number of samples to compute: one if they are greedy or empty, because these are
        equal."""
        return self.num_samples if self.temperature > 0 and self.max_tokens else 1

    @property
    def computed_prompt(self) -> list[int]:
        """The prompt tokens to compute. Without sampling, the last one is not needed."""
        return self.prompt if self.max_tokens else self.prompt[:-1] or self.prompt


@dataclass(frozen=True)
class TopK:
    """The likeliest tokens per position. Both arrays are [length, k]. An empty cell has id 0 and
    logprob -99999."""

    token_ids: Int32Array
    logprobs: Float32Array


@dataclass(frozen=True)
class SampledTokens:
    """One sample. `tokens` and `logprobs` are [n] and include the stop token.

    Logprobs are those after penalties, temperature and filters. A greedy sample's are after
    penalties, at temperature 1.
    `stopped` is False at the length limit. `carried_at` lists the lengths at changes of weights."""

    tokens: Int32Array
    logprobs: Float32Array
    stopped: bool
    topk: TopK | None = None
    carried_at: tuple[int, ...] = ()


@dataclass(frozen=True)
class PromptScores:
    """The answer to a `PromptScoring`. Other parts are None.

    `logprobs` is [prompt], with NaN for unscored positions. `topk` is [prompt, k]. `targets` is
    [m]. `draws` is [prompt - 1, k], and its row i is about position i + 1."""

    logprobs: Float32Array | None = None
    topk: TopK | None = None
    targets: Float32Array | None = None
    draws: TopK | None = None


@dataclass(frozen=True)
class EngineResult:
    """All samples of a request, or its `failure`.

    `cached_tokens` counts the first sample's prompt tokens in the prefix cache. `computed_tokens`
    counts computed prompt tokens of all samples."""

    id: str
    samples: tuple[SampledTokens, ...]
    prompt: PromptScores | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0
    failure: TandemError | None = None


@dataclass(frozen=True)
class EngineDelta:
    """The tokens that one step added to one sample. In the last delta, `finished` is True.

    A greedy request reports only sample 0."""

    id: str
    index: int
    new: SampledTokens
    finished: bool


@dataclass(frozen=True)
class EngineUse:
    """After a step: the samples without room in the engine, and the used share of the KV cache."""

    queued: int = 0
    kv_used: float = 0.0


@dataclass(frozen=True)
class StepOutput:
    """Results of ended requests, and deltas of streamed ones.

    `begun` names unfinished requests that were computed for the first time. `loads` has an entry
    for each step."""

    results: list[EngineResult] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    deltas: list[EngineDelta] = field(default_factory=list)
    loads: list[EngineUse] = field(default_factory=list)


class Engine(Protocol):
    @property
    def facts(self) -> EngineFacts: ...

    def add(self, request: EngineRequest) -> None:
        """Admit a request. Its id must not be in use."""

    def step(self) -> StepOutput:
        """Compute the next token of admitted requests. Requests without room wait."""

    def settle(self) -> StepOutput:
        """Stop computing until the next `step`. Returns the output computed ahead.

        Call it before a sleep, a load, a `pause`, or a `carry_over` to another adapter."""

    def abort(self, ids: Sequence[str]) -> None:
        """Drop requests without a result. Unknown ids are ignored."""

    def finish(self, ids: Sequence[str]) -> StepOutput:
        """End requests with the tokens that they have, as if these were all. A request with a
        sample without a token continues. The engine must be settled."""

    def load(self, directory: Path) -> frozenset[str]:
        """Replace the weights in place by a directory of safetensors, and drop all adapters.

        Returns the names of parameters without a value. The engine must be idle or paused. Raises
        `WeightsTouched`, after which only another load is allowed."""

    def load_handoff(self, handoff: common_pb2.Handoff) -> frozenset[str]:
        """Like `load`, from a trainer's memory (`weights/handoff.py`)."""

    def pause(self) -> None:
        """Set running requests aside between two steps. They keep only their tokens.

        The engine counts as idle until `resume`."""

    def resume(self) -> None:
        """Continue paused requests. Keys and values are computed again."""

    def carry_over(self, ids: Sequence[str], *, adapter: str | None = None) -> None:
        """Continue requests with new weights after a `pause`, or with another adapter.

        Another adapter computes their keys and values again. Unknown ids are ignored."""

    def weight_sums(self) -> dict[str, int]:
        """Return the sums (`tandem/weights/sums.py`) of the engine's numbers, in its dtype.

        The engine must be idle or paused, and its weights awake."""

    def sleep(self, level: SleepLevel) -> None:
        """Give back the KV cache, and move or drop the weights. Dropping includes adapters.

        The engine must be idle. Add no request before `wake_cache`."""

    def wake_weights(self) -> None:
        """Bring the weights back. Dropped ones have no values before a `load`."""

    def wake_cache(self) -> None:
        """Allocate the KV cache again, after the weights. It must be reset."""

    def memory(self) -> EngineMemory:
        """Measure the memory in use."""

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prompts. Returns False if the engine could not."""

    def score(self, tokens: Sequence[int]) -> Float32Array:
        """Return the logprobs [T-1] of tokens[1:] at temperature 1. The engine must be idle or
        paused."""

    def add_adapter(self, name: str, directory: Path) -> None:
        """Load an adapter. Requests may be running. Raises `LoadFailed`, and then has changed
        nothing."""

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter that no running request uses."""
