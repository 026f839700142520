"""The imports that take most of an engine's start."""

from __future__ import annotations

import gc

from sampler_service.vllm.environment import is_cpu_build


def import_libraries() -> None:
    """Import vLLM, with the parts that every engine uses.

    The garbage collector, which would take seconds in vain, is off until the engine is made."""
    gc.disable()
    import sampler_service.vllm.engine  # noqa: F401

    if is_cpu_build():
        import vllm.v1.worker.cpu_worker
    else:
        import vllm.v1.worker.gpu.model_runner
        import vllm.v1.worker.gpu_model_runner
        import vllm.v1.worker.gpu_worker  # noqa: F401

    gc.freeze()
