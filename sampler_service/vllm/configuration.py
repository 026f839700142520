"""vLLM's arguments and configuration, from a model and our settings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from sampler_service.vllm.environment import in_own_process
from sampler_service.vllm.memory import memory_share
from tandem.errors import WorkerStartFailed
from tandem.settings.workers import SamplerSettings
from tandem.weights.model_config import has_experts, model_length, text_config, why_unserved_by_cpu

_DEFAULT_LENGTH = 8192
"""The length for a model whose configuration names none."""
_BATCH_TOKENS = 8192
_CPU_BLOCK = 32
_GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512)
"""Batch sizes, in tokens, with a captured CUDA graph. vLLM would capture 51. Padding a batch in
between costs little."""
_GRAPHS_PER_SEQUENCE = 2
"""The largest captured batch, in tokens per sequence."""
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum ranks that vLLM accepts."""
_ADAPTED_ELSEWHERE = {"stablelm"}
"""Model types whose own vLLM class has no adapters, while vLLM's transformers class has them."""
_HELD_PER_COMPUTED = 4
"""Adapters in the engine per adapter in a batch."""


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> str:
    """Return "cuda" or "cpu". Raises `WorkerStartFailed` if the wanted device is absent."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise WorkerStartFailed("the sampler is set to run on CUDA, but there is no CUDA device")
    if wanted == "cpu" and available:
        raise WorkerStartFailed("the sampler is set to run on the CPU, but vLLM's build is CUDA's")
    return "cuda" if available else "cpu"


def engine_args(model: Path, settings: SamplerSettings, *, sleeps: bool = False) -> EngineArgs:
    """Return vLLM's arguments. On a GPU, an engine that `sleeps` needs another allocator."""
    device = choose_device(settings.device)
    length = settings.max_model_len or model_length(model) or _DEFAULT_LENGTH
    dtype = settings.dtype if settings.dtype != "auto" else ("bfloat16", "float32")[device == "cpu"]
    args = EngineArgs(
        model=str(model),
        dtype=dtype,
        seed=0,
        max_model_len=length,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=_BATCH_TOKENS,
        tensor_parallel_size=settings.ranks,
        # One worker is this process. Several are child processes of it.
        distributed_executor_backend="uni" if settings.ranks == 1 else "mp",
        load_format="safetensors",  # never a pickled .bin
        trust_remote_code=False,  # never code from the model's folder
        disable_log_stats=True,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        max_logprobs=-1,
        use_tqdm_on_load=False,
        # Schedule the next step during a step where possible. None lets vLLM decide.
        async_scheduling=None if in_own_process(settings) else False,
        worker_extension_cls="sampler_service.vllm.worker_extension.WeightsExtension",
    )
    if device == "cpu":
        args.worker_cls = "sampler_service.vllm.cpu_worker.ChangedWorker"
        args.enforce_eager = True
        args.enable_chunked_prefill = False
        args.max_num_batched_tokens = max(_BATCH_TOKENS, length)
        args.block_size = _CPU_BLOCK
        args.kv_cache_memory_bytes = settings.kv_cache_bytes
    else:
        free, total = torch.cuda.mem_get_info()
        wanted = settings.gpu_memory_bytes or int(total * settings.gpu_memory_utilization)
        args.worker_cls = "sampler_service.vllm.gpu_worker.BudgetedWorker"
        args.gpu_memory_utilization = memory_share(wanted, free=free, total=total)
        args.enable_sleep_mode = sleeps
        most = _GRAPHS_PER_SEQUENCE * settings.max_num_seqs
        args.cudagraph_capture_sizes = [size for size in _GRAPH_SIZES if size <= most]
        if not has_experts(model):  # nothing to tune
            args.enable_flashinfer_autotune = False
    if settings.max_lora_rank:
        args.enable_lora = True
        if text_config(model).get("model_type") in _ADAPTED_ELSEWHERE:
            args.model_impl = "transformers"
        args.max_lora_rank = next(r for r in _RANKS if r >= settings.max_lora_rank)
        args.max_loras = settings.max_adapters
        args.max_cpu_loras = settings.max_adapters * _HELD_PER_COMPUTED
    return args


def engine_config(args: EngineArgs, *, fit: bool) -> VllmConfig:
    """Return the configuration of an engine. `fit` limits its length to the KV cache.

    vLLM does this only for the length -1, and then finds the model's length in other places."""
    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    if not torch.cuda.is_available():
        _check_heads(config.model_config)
    if fit:
        about = config.model_config
        about.original_max_model_len = -1
        # vLLM first makes tables for `max_num_seqs` sequences of this length, so keep it small.
        about.max_model_len = min(about.max_model_len, _most_tokens(config))
    return config


def _check_heads(about: ModelConfig) -> None:
    """Raise `WorkerStartFailed` for head sizes that vLLM's CPU build does not compute."""
    reason = "" if about.use_mla else why_unserved_by_cpu(about.get_head_size())
    if reason:
        raise WorkerStartFailed(reason)


def _most_tokens(config: VllmConfig) -> int:
    """Return the shortest length above the KV cache's size, or the model's own if unclear."""
    about, budget = config.model_config, config.cache_config.kv_cache_memory_bytes
    windowed = getattr(about.hf_text_config, "sliding_window", None)
    if budget is None or windowed or about.use_mla or about.is_hybrid:
        return int(about.max_model_len)
    layers = about.get_num_layers(config.parallel_config)
    heads = about.get_num_kv_heads(config.parallel_config)
    numbers = 2 * layers * heads * about.get_head_size()
    return int(budget // (numbers * about.dtype.itemsize)) + 1
