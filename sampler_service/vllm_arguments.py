"""vLLM's arguments for a model and our settings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from vllm.engine.arg_utils import EngineArgs

from sampler_service.model_files import model_length
from tandem.errors import WorkerStartFailed
from tandem.settings import SamplerSettings

_DEFAULT_LENGTH = 8192
_BATCH_TOKENS = 8192
_CPU_BLOCK = 32
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM can be started with."""
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
        load_format="safetensors",  # never a pickled .bin
        trust_remote_code=False,  # never code from the model's folder
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
