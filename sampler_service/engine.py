"""The protocol between the sampler and an inference engine: plain values, no library types.

`vllm.engine.VllmEngine` implements it. `service.engine_process.EngineProcess` implements it for an
engine in another process. Tests of the scheduler inject a fake. Only the thread that made an engine
may call it.

An engine may compute ahead of the output of `step`. `settle` ends that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sampler_service.structured_output import CompiledGrammar
from tandem.errors import IllegalTransition, LoadFailed, TandemError
from tandem.v1 import common_pb2

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class WeightsTouched(LoadFailed):
    """A load failed after it began to change the weights. The engine must not sample before another
    load succeeds."""

    type = LoadFailed.type


class EngineState(Enum):
    """The state of an engine. It computes samples only while it is awake. See docs/sharing.md."""

    AWAKE = "awake"
    LOADING = "loading"
    ASLEEP = "asleep"
    WAKING = "waking"
    FAILED = "failed"

    def move_to(self, new: EngineState) -> EngineState:
        """Return `new`. Raises `IllegalTransition` if this state does not lead to it."""
        if new not in _MOVES[self]:
            raise IllegalTransition(f"a sampler that is {self.value} cannot become {new.value}")
        return new


_MOVES = {
    EngineState.AWAKE: {EngineState.LOADING, EngineState.ASLEEP, EngineState.FAILED},
    EngineState.LOADING: {EngineState.AWAKE, EngineState.FAILED},
    EngineState.ASLEEP: {EngineState.WAKING, EngineState.FAILED},
    EngineState.WAKING: {EngineState.AWAKE, EngineState.FAILED},
    EngineState.FAILED: set[EngineState](),
}


class SleepLevel(IntEnum):
    """The place of the weights while an engine sleeps. It gives back its KV cache at both
    levels."""

    KEEP_WEIGHTS = 1
    """Host memory."""
    DROP_WEIGHTS = 2
    """Nowhere. Adapters are dropped too, and the engine needs a load before it computes again."""


@dataclass(frozen=True)
class EngineMemory:
    """Memory in use, in bytes.

    On a GPU, `device` counts the memory of all processes, and `host` the weights of a sleeping
    engine. On a CPU, `device` is the resident memory of the process, and `host` is 0.
    """

    device: int
    host: int


@dataclass(frozen=True)
class EngineFacts:
    """The properties of an engine.

    `max_length` limits prompt and sampled tokens together. It is below `model_length` if the KV
    cache is smaller or a setting says so. `end_tokens` are the model's end-of-sequence tokens.
    `max_lora_rank` 0 means no adapters. Otherwise the engine holds up to `max_adapters`.
    """

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
    """The scores to compute for a prompt.

    The score of position p >= 1 is the logprob of a token at that position, given the tokens before
    it, at temperature 1.

    - `first`: the first position whose own token is scored, or None. From there on, the `topk`
      likeliest tokens are listed too.
    - `target_ids` [m]: tokens to score at `target_positions` [m], which ascend.
    - `draws`: the number of tokens to draw at every position, with `draw_temperature` (0: the
      likeliest) and, if set, `draw_seed`.
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
        """The first position to compute, or None. The prefix cache may serve tokens more than one
        position before it."""
        starts = [self.first] if self.first is not None else []
        starts += [int(self.target_positions[0])] if len(self.target_positions) else []
        starts += [1] if self.draws else []
        return min(starts, default=None)


@dataclass(frozen=True)
class EngineRequest:
    """One prompt, sampled `num_samples` times.

    Example: `EngineRequest(id="op-1", prompt=[20, 30], num_samples=8, max_tokens=4,
    temperature=1.0, top_k=-1, top_p=1.0, seed=7, stop_token_ids=(1,))`.

    With a seed s, sample i depends only on (s, i), the request and the weights. Without a seed it
    is random. Temperature 0 is greedy. `max_tokens` 0 scores the prompt only. `topk` is the number
    of alternatives recorded per sampled token. `adapter` names an added adapter, and None means the
    loaded weights alone. A `streamed` request yields one `EngineDelta` per sample and step.
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
    grammar: CompiledGrammar | None = None
    streamed: bool = False

    @property
    def distinct_samples(self) -> int:
        """The number of samples to compute. Greedy or empty samples of one prompt are equal, so one
        is enough."""
        return self.num_samples if self.temperature > 0 and self.max_tokens else 1

    @property
    def computed_prompt(self) -> list[int]:
        """The prompt tokens to compute. Without sampling, the last token is not needed."""
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

    The logprobs belong to the sampled distribution, after temperature, top_k and top_p. A greedy
    sample has logprobs at temperature 1. `stopped` is False if the length limit ended the sample.
    `carried_at` lists the sample's length at each change of weights.
    """

    tokens: Int32Array
    logprobs: Float32Array
    stopped: bool
    topk: TopK | None = None
    carried_at: tuple[int, ...] = ()


@dataclass(frozen=True)
class PromptScores:
    """The answer to a `PromptScoring`. Parts that were not requested are None.

    `logprobs` is [prompt], with NaN at positions without a score. `topk` is [prompt, k]. `targets`
    is [m]. `draws` is [prompt - 1, k], and its row i is about position i + 1.
    """

    logprobs: Float32Array | None = None
    topk: TopK | None = None
    targets: Float32Array | None = None
    draws: TopK | None = None


@dataclass(frozen=True)
class EngineResult:
    """All samples of a request, or the `failure` that ended it.

    `cached_tokens` counts the prompt tokens found in the prefix cache for the first sample.
    `computed_tokens` counts computed prompt tokens of all samples.
    """

    id: str
    samples: tuple[SampledTokens, ...]
    prompt: PromptScores | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0
    failure: TandemError | None = None


@dataclass(frozen=True)
class EngineDelta:
    """The tokens that one step added to one sample of a streamed request.

    In the last delta, `finished` is True and `new.stopped` gives the reason. A greedy request
    reports only sample 0.
    """

    id: str
    index: int
    new: SampledTokens
    finished: bool


@dataclass(frozen=True)
class StepOutput:
    """The output of a step: results of ended requests, and deltas of all streamed requests.

    `begun` names requests that were computed for the first time and have not ended.
    """

    results: list[EngineResult] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    deltas: list[EngineDelta] = field(default_factory=list)


class Engine(Protocol):
    """An engine with one set of weights and several adapters."""

    @property
    def facts(self) -> EngineFacts: ...

    def add(self, request: EngineRequest) -> None:
        """Admit a request. Its id must not be in use."""

    def step(self) -> StepOutput:
        """Compute the next token of the admitted requests. Requests without room wait for earlier
        ones to end."""

    def settle(self) -> StepOutput:
        """Stop computing until the next `step`, and return the output that was computed ahead.

        Call it before a sleep, a load, a `pause`, or a `carry_over` to another adapter.
        """

    def abort(self, ids: Sequence[str]) -> None:
        """Drop requests without a result. Unknown ids are ignored."""

    def load(self, directory: Path) -> frozenset[str]:
        """Replace the weights in place by a directory of safetensors, and drop all adapters.

        Returns the names of parameters without a value. The engine must be idle or paused, and its
        KV cache may be asleep. Raises `WeightsTouched`, after which only another load is allowed.
        """

    def load_handoff(self, handoff: common_pb2.Handoff) -> frozenset[str]:
        """Load weights that a trainer hands over in memory (`weights/handoff.py`). See `load`."""

    def pause(self) -> None:
        """Set running requests aside between two steps. The engine counts as idle until `resume`.

        The requests keep their tokens and lose their keys and values.
        """

    def resume(self) -> None:
        """Continue the paused requests. Their keys and values are computed again."""

    def carry_over(self, ids: Sequence[str], *, adapter: str | None = None) -> None:
        """Continue requests with the new weights after a `pause`, or with another adapter.

        A change of adapter computes their keys and values again. Unknown ids are ignored.
        """

    def weight_sums(self) -> dict[str, int]:
        """Return the sums (`tandem/weights/sums.py`) of the engine's numbers, in the dtype of its
        `facts`.

        The engine must be idle or paused, and its weights awake.
        """

    def sleep(self, level: SleepLevel) -> None:
        """Give back the KV cache, and move the weights off the device or drop them with all
        adapters.

        The engine must be idle. Add no request before `wake_cache`.
        """

    def wake_weights(self) -> None:
        """Bring the weights back. Dropped weights get memory, but no values before a `load`."""

    def wake_cache(self) -> None:
        """Allocate the KV cache again, after the weights. Its contents are lost, so it must be
        reset."""

    def memory(self) -> EngineMemory:
        """Measure the memory in use."""

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prompts. Returns False if the engine could not."""

    def score(self, tokens: Sequence[int]) -> Float32Array:
        """Return the logprobs [T-1] of tokens[1:] at temperature 1. The engine must be idle or
        paused."""

    def add_adapter(self, name: str, directory: Path) -> None:
        """Load an adapter beside the weights. Requests may be running.

        Raises `LoadFailed` and then has changed nothing.
        """

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter that no running request uses."""
