"""The protocol between the sampler and an inference engine: plain values, no types of a library.

`vllm.engine.VllmEngine` implements it, and so does `service.engine_process.EngineProcess`, for an
engine in another process; tests of the scheduler inject a fake. An engine belongs to the thread
that made it: that thread steps it, and no other calls it.

An engine may compute ahead: more than what `step` has returned. `settle` ends that.
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
    """A load failed after it had begun to change the weights: sampling must wait for a load that
    succeeds."""


class EngineState(Enum):
    """What an engine may do: samples are computed only while it is awake. docs/sharing.md."""

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
    """What becomes of the weights while an engine is asleep. The KV cache is given back anyway."""

    KEEP_WEIGHTS = 1
    """They wait in host memory."""
    DROP_WEIGHTS = 2
    """They are dropped, and all adapters with them: the engine computes nothing before a load."""


@dataclass(frozen=True)
class EngineMemory:
    """What is in use, in bytes. On a CPU device and host are the same memory: `device` is the
    resident memory of the process, `host` 0. On a GPU, `device` counts all processes' memory, and
    `host` the weights of an engine that is asleep."""

    device: int
    host: int


@dataclass(frozen=True)
class EngineFacts:
    """What an engine is.

    `max_length` counts prompt and sampled tokens together; where it is less than `model_length`,
    the KV cache holds no longer sequence, or a setting says so. `end_tokens` are the model's
    end-of-sequence tokens. `max_lora_rank` 0 means no adapters; otherwise the engine holds up to
    `max_adapters` of them.
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
    """What to compute about a prompt's tokens. Position p >= 1 is scored by the logprobs, at
    temperature 1, of tokens in place of prompt[p], given the tokens before it.

    `first`: the first position whose own token is scored, or None for none; the `topk` likeliest
    tokens are listed from `first` on. `target_ids` [m] are scored at `target_positions` [m], which
    ascend. `draws` tokens are drawn at every position with `draw_temperature` (0: the likeliest),
    from `draw_seed` if it is set.
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
        """The first position to compute, None for none. The prefix cache may serve tokens more
        than one position before it."""
        starts = [self.first] if self.first is not None else []
        starts += [int(self.target_positions[0])] if len(self.target_positions) else []
        starts += [1] if self.draws else []
        return min(starts, default=None)


@dataclass(frozen=True)
class EngineRequest:
    """One prompt, sampled `num_samples` times.

    Literal example: `EngineRequest(id="op-1", prompt=[20, 30], num_samples=8, max_tokens=4,
    temperature=1.0, top_k=-1, top_p=1.0, seed=7, stop_token_ids=(1,))`. Sample i with seed s is a
    function of (s, i), the request and the weights; without a seed it is random. Temperature 0 is
    greedy. With `max_tokens` 0, samples are empty: the prompt is scored alone. `topk` alternatives
    are recorded per sampled token. `adapter` names an adapter that was added to the engine; None
    samples from the loaded weights alone. A `streamed` request yields an `EngineDelta` per sample
    and step.
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
        """How many samples are computed: greedy and empty samples of one prompt are all alike."""
        return self.num_samples if self.temperature > 0 and self.max_tokens else 1

    @property
    def computed_prompt(self) -> list[int]:
        """The prompt tokens that are computed: nothing follows from the last one, unless tokens are
        sampled."""
        return self.prompt if self.max_tokens else self.prompt[:-1] or self.prompt


@dataclass(frozen=True)
class TopK:
    """The likeliest tokens per position. `token_ids` and `logprobs` are [length, k]; an empty cell
    has id 0 and logprob -99999."""

    token_ids: Int32Array
    logprobs: Float32Array


@dataclass(frozen=True)
class SampledTokens:
    """One sample. `tokens` and `logprobs` are [n] and include the stop token.

    The logprobs are those of the distribution that was sampled from, after temperature, top_k and
    top_p; those of a greedy sample are at temperature 1. `stopped` is False when the length ended
    the sample. `carried_at` says how many tokens it had each time that it was carried over to other
    weights.
    """

    tokens: Int32Array
    logprobs: Float32Array
    stopped: bool
    topk: TopK | None = None
    carried_at: tuple[int, ...] = ()


@dataclass(frozen=True)
class PromptScores:
    """The answer to a `PromptScoring`; a part that was not asked for is None.

    `logprobs` is [prompt], and NaN at positions without a score. `topk` is [prompt, k]. `targets`
    is [m]. `draws` is [prompt - 1, k], where row i is about position i + 1.
    """

    logprobs: Float32Array | None = None
    topk: TopK | None = None
    targets: Float32Array | None = None
    draws: TopK | None = None


@dataclass(frozen=True)
class EngineResult:
    """All samples of a request, or the `failure` that ended it.

    `cached_tokens` counts the prompt tokens that the prefix cache held when the first sample began;
    `computed_tokens` the prompt tokens that were computed, for all samples together.
    """

    id: str
    samples: tuple[SampledTokens, ...]
    prompt: PromptScores | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0
    failure: TandemError | None = None


@dataclass(frozen=True)
class EngineDelta:
    """The tokens that one step added to one sample of a streamed request. When it is `finished`,
    `new.stopped` says how it ended. A greedy request reports sample 0 only."""

    id: str
    index: int
    new: SampledTokens
    finished: bool


@dataclass(frozen=True)
class StepOutput:
    """The requests that ended in a step, and the deltas of streamed ones, those that ended
    included. `begun` names those that were computed for the first time and have not ended."""

    results: list[EngineResult] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    deltas: list[EngineDelta] = field(default_factory=list)


class Engine(Protocol):
    """An engine that holds one set of weights, and adapters beside them."""

    @property
    def facts(self) -> EngineFacts: ...

    def add(self, request: EngineRequest) -> None:
        """Admit a request. Its id must not be in use."""

    def step(self) -> StepOutput:
        """Compute the next token of every admitted request, as far as there is room: the others
        wait for the end of those before them."""

    def settle(self) -> StepOutput:
        """Compute nothing more before the next `step`, and return what was computed ahead. Before a
        sleep, a load, a `pause`, or a `carry_over` to another adapter, it must be called."""

    def abort(self, ids: Sequence[str]) -> None:
        """Drop requests without a result; ignore unknown ids."""

    def load(self, directory: Path) -> frozenset[str]:
        """Replace the weights in place by a directory of safetensors, and drop all adapters. Return
        the names of the parameters that got no value.

        The engine must be idle or paused; its KV cache may be asleep. Raises `WeightsTouched`; only
        another load is allowed then.
        """

    def load_handoff(self, handoff: common_pb2.Handoff) -> frozenset[str]:
        """As `load`, of the weights that a trainer hands over in memory (`weights/handoff.py`)."""

    def pause(self) -> None:
        """Set aside what is under way, between two steps: it keeps its tokens, loses its keys and
        values, and is not computed before `resume`. Meanwhile the engine counts as idle."""

    def resume(self) -> None:
        """Go on with what was under way: its keys and values are computed again."""

    def carry_over(self, ids: Sequence[str], *, adapter: str | None = None) -> None:
        """Note that requests go on with the weights that are loaded now, after a `pause`; or let
        them go on with another adapter, for which what they had computed is computed again. Ignore
        unknown ids."""

    def weight_sums(self) -> dict[str, int]:
        """Return the sums (`tandem/weights/sums.py`) of the numbers that the engine computes with,
        in the type of its `facts`. The engine must be idle or paused, its weights awake."""

    def sleep(self, level: SleepLevel) -> None:
        """Give the KV cache back, and move the weights off the device, or drop them with all
        adapters. The engine must be idle; nothing may be added before `wake_cache`."""

    def wake_weights(self) -> None:
        """Bring the weights back. Dropped ones get their memory, and no values before a `load`."""

    def wake_cache(self) -> None:
        """Give the KV cache its memory again, after the weights. It must be reset: what is cached
        is lost."""

    def memory(self) -> EngineMemory:
        """Measure what is in use."""

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prompts. False if the engine could not."""

    def score(self, tokens: Sequence[int]) -> Float32Array:
        """Logprobs [T-1] of tokens[1:] at temperature 1. The engine must be idle or paused."""

    def add_adapter(self, name: str, directory: Path) -> None:
        """Load an adapter beside the weights, while requests may be running.

        Raises `LoadFailed`, and has changed nothing then.
        """

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter. No running request may use it."""
