"""vLLM's internals that our code uses exist in the installed version.

The CUDA build needs no GPU here."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import sampler_service.vllm
from sampler_service.vllm.internals import check_version, meet_in_a_file

NAMES = (
    # The engine and its core, in one process.
    "vllm.v1.engine.llm_engine:LLMEngine.output_processor",
    "vllm.v1.engine.output_processor:OutputProcessor.tokenizer",
    "vllm.v1.engine.output_processor:OutputProcessor.request_states",
    "vllm.v1.engine.output_processor:RequestState.logprobs_processor",
    "vllm.v1.engine.output_processor:RequestState.detokenizer",
    "vllm.v1.engine.output_processor:RequestState.num_cached_tokens",
    "vllm.v1.engine.core:EngineCore.scheduler",
    "vllm.v1.engine.core:EngineCore.model_executor",
    "vllm.v1.engine.core:EngineCore.batch_queue",
    "vllm.v1.core.sched.scheduler:Scheduler.set_pause_state",
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor.register_failure_callback",
    "vllm.v1.executor.multiproc_executor:get_distributed_init_method",
    "vllm.v1.executor.uniproc_executor:get_distributed_init_method",
    "vllm.v1.engine.core:EngineCore.structured_output_manager",
    "vllm.v1.structured_output:StructuredOutputManager.backend",
    "vllm.v1.structured_output:StructuredOutputManager._use_async_grammar_compilation",
    "vllm.sampling_params:SamplingParams._validate_structured_outputs",
    # The choice of the longest sequence.
    "vllm.config.model:ModelConfig.original_max_model_len",
    "vllm.model_executor.models.registry:_run_in_subprocess",
    # The prefix cache.
    "vllm.v1.core.sched.scheduler:Scheduler.kv_cache_manager",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.coordinator",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_blocks",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.create_kv_cache_blocks",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.single_type_managers",
    "vllm.v1.core.sched.scheduler:Scheduler.requests",
    "vllm.v1.core.sched.scheduler:Scheduler.running",
    "vllm.v1.core.sched.scheduler:Scheduler.waiting",
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request",
    "vllm.v1.core.sched.scheduler:Scheduler.prev_step_scheduled_req_ids",
    "vllm.v1.request:Request.lora_request",
    "vllm.v1.request:Request.block_hashes",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.find_longest_cache_hit",
    # Both model runners, in the worker.
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.reset_lora_state",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.reset_encoder_cache",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.reset_mm_cache",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.max_num_reqs",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.kv_caches",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.reload_weights",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.reset_lora_state",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.reset_encoder_cache",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.reset_mm_cache",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.max_num_reqs",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.kv_caches",
    "vllm.v1.worker.cpu_worker:CPUWorker.load_model",
    "vllm.platforms.cpu:CpuPlatform.register_triton_kernel_overrides",
    # The worker on a GPU.
    "vllm.v1.worker.gpu_worker:Worker.init_device",
    "vllm.v1.worker.gpu_worker:Worker.load_model",
    "vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
    "vllm.v1.worker.gpu_worker:Worker.sleep",
    "vllm.v1.worker.gpu_worker:Worker.init_snapshot",
    "vllm.v1.worker.gpu_worker:Worker.device",
    "vllm.v1.worker.gpu_worker:Worker.model_runner",
    "vllm.utils.mem_utils:MemorySnapshot.total_memory",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.profile_run",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.model_memory_usage",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.load_lora_model",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.profile_run",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.model_memory_usage",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_lora_model",
    "vllm.model_executor.kernels.linear.cute_dsl.ll_bf16:_cutedsl_available",
    "vllm.device_allocator.cumem:CuMemAllocator.pointer_to_data",
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    "vllm.model_executor.layers.utils:cpu_unquantized_gemm",
    "vllm.model_executor.layers.linear:QKVParallelLinear.num_kv_head_replicas",
    "vllm.model_executor.layers.linear:QKVParallelLinear.num_heads",
    "vllm.model_executor.layers.linear:QKVParallelLinear.head_size",
    # The first model runner.
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.requests",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.input_batch",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.query_start_loc",
    # The second model runner.
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prompt_logprobs_worker",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.lora_state",
    "vllm.v1.worker.gpu.lora_utils:LoraState.lora_ids",
    "vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker.add_request",
    "vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker.remove_request",
    "vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker.compute_prompt_logprobs",
    "vllm.v1.worker.gpu.input_batch:InputBatch.req_ids",
    "vllm.v1.worker.gpu.input_batch:InputBatch.idx_mapping_np",
    "vllm.v1.worker.gpu.input_batch:InputBatch.num_scheduled_tokens",
    "vllm.v1.worker.gpu.input_batch:InputBatch.query_start_loc_np",
    "vllm.v1.worker.gpu.input_batch:InputBatch.num_computed_prefill_tokens_np",
    # Adapters (`adapter_internals`).
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.load_lora_model",
    "vllm.lora.layers:LogitsProcessorWithLoRA.create_lora_weights",
    "vllm.lora.layers:LogitsProcessorWithLoRA.sharded_to_full_mapping_gpu",
    "vllm.lora.model_manager:LoRAModelManager.supported_lora_modules",
    "vllm.lora.model_manager:LoRAModelManager.register_module",
    "vllm.lora.model_manager:LoRAModelManager.lora_slots",
    "vllm.lora.model_manager:LoRAModelManager._get_punica_wrapper",
    "vllm.lora.worker_manager:WorkerLoRAManager._adapter_manager",
    "vllm.lora.model_manager:LoRAModelManager.lora_index_to_id",
    "vllm.lora.model_manager:LoRAModelManager.lora_config",
    "vllm.lora.model_manager:LoRAModelManager.modules",
    "vllm.lora.model_manager:LoRAModelManager._set_adapter_mapping",
    "vllm.lora.model_manager:LoRAModelManager._last_mapping",
    "vllm.lora.ops.torch_ops.lora_ops:bgmv_shrink",
    "vllm.lora.ops.torch_ops.lora_ops:bgmv_expand",
    "vllm.lora.ops.torch_ops.lora_ops:bgmv_expand_slice",
    "vllm.lora.punica_wrapper.punica_cpu:bgmv_shrink",
    "vllm.lora.punica_wrapper.punica_cpu:bgmv_expand",
    "vllm.lora.punica_wrapper.punica_cpu:bgmv_expand_slice",
)
"""Used names: MODULE:CLASS.NAME or MODULE:NAME. On a CPU, experts' `moe_kernel` is used too."""

OF_OTHERS = {"_C", "_host_emptyCache"}  # torch's


def test_the_installed_version_was_checked():
    check_version()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_there(name):
    module, _, path = name.partition(":")
    owner, _, attribute = path.partition(".")
    found = getattr(import_or_skip(module), owner)
    if not attribute:
        return
    # An attribute that only a constructor sets is found in the source.
    sources = (inspect.getsource(each) for each in found.__mro__ if each is not object)
    declared = hasattr(found, attribute) or attribute in inspect.get_annotations(found)
    assert declared or any(f"self.{attribute}" in each for each in sources)


def import_or_skip(module: str) -> ModuleType:
    """Skip the test if the module needs a GPU's driver."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if "libcuda" not in str(error):
            raise
        pytest.skip(f"{module} needs a driver")


def trees() -> list[ast.Module]:
    return [
        ast.parse(file.read_text())
        for file in Path(sampler_service.vllm.__file__).parent.glob("*.py")
    ]


def imported() -> list[str]:
    """MODULE:NAME of the adapter's imports from vLLM, also those for types."""
    found = {
        f"{node.module}:{name.name}"
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for name in node.names
    }
    return sorted(found)


@pytest.mark.parametrize("name", imported())
def test_an_imported_name_is_there(name):
    module, _, attribute = name.partition(":")
    if not hasattr(import_or_skip(module), attribute):
        importlib.import_module(f"{module}.{attribute}")


def test_every_private_name_of_another_object_is_listed():
    listed = {name.replace(":", ".").rpartition(".")[2] for name in NAMES}
    reached = {
        node.attr
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match(r"_(?!_)", node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }
    assert reached - listed == OF_OTHERS


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vllm.v1.worker.gpu_worker:Worker.sleep", {"level": 1}),
        ("vllm.v1.worker.gpu_worker:Worker.load_model", {"load_dummy_weights": False}),
        ("vllm.v1.worker.gpu_worker:Worker.determine_available_memory", {}),
        ("vllm.v1.worker.gpu_model_runner:GPUModelRunner.profile_run", {}),
        ("vllm.v1.worker.gpu.model_runner:GPUModelRunner.profile_run", {}),
        ("vllm.model_executor.models.registry:_run_in_subprocess", {"fn": print}),
    ],
)
def test_a_function_takes_what_it_is_given(name, arguments):
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        owner, found = found, getattr(found, part)
    receiver = [owner] if inspect.isclass(owner) else []
    inspect.signature(found).bind(*receiver, **arguments)


def test_the_version_is_checked_before_anything_slow_is_imported():
    code = "import sys, sampler_service.vllm.internals; print({'torch', 'vllm'} & {*sys.modules})"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "set()", answer.stderr


def test_engines_that_start_at_once_meet_in_files_of_their_own_and_take_no_port():
    import torch.distributed as dist
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    meet_in_a_file()
    modules = [multiproc_executor, uniproc_executor]
    found = [each.get_distributed_init_method("127.0.0.1", 1) for each in modules * 10]
    assert len(set(found)) == 20
    assert {each.partition("://")[0] for each in found} == {"file"}
    dist.init_process_group("gloo", init_method=found[0], rank=0, world_size=1)
    dist.destroy_process_group()
