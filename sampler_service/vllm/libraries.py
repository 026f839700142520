"""The imports that take most of an engine's start."""

from __future__ import annotations

import gc

from sampler_service.vllm.environment import is_cpu_build


def import_libraries() -> None:
    """Import vLLM, with the parts that every engine uses.

    The garbage collector, which would take seconds in vain, is off until the engine is made."""
    gc.disable()
    import sampler_service.vllm.engine

    if is_cpu_build():
        import vllm.lora.punica_wrapper.punica_cpu
        import vllm.model_executor.layers.quantization.online.base
        import vllm.v1.attention.backends.cpu_attn
        import vllm.v1.core.sched.scheduler
        from vllm.plugins import load_general_plugins

        import sampler_service.vllm.cpu_worker  # noqa: F401
        from sampler_service.vllm.internals import replace_kernels

        load_general_plugins()
        replace_kernels()
    else:
        import vllm.v1.worker.gpu.model_runner
        import vllm.v1.worker.gpu_model_runner
        import vllm.v1.worker.gpu_worker  # noqa: F401

    gc.freeze()
