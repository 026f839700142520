"""The slow imports of a rank's start: torch and transformers."""

from __future__ import annotations

import gc
import os
import sys

import numpy  # noqa: F401 - starts threads when imported, which need their usual priority

_LAST = "trainer_service.service.hosted_runs"


_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
_PINNING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"


def set_environment() -> None:
    """Set the environment that torch reads at its import."""
    # Waiting OpenMP threads must sleep. Spinning, they take cores from the gateway, the sampler and
    # each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Pinning mostly clears pages. Without this, one thread does it.
    if not any(map(os.environ.get, _ALLOCATOR)):
        os.environ[_ALLOCATOR[0]] = _PINNING


def import_libraries() -> None:
    """Import the libraries, once in a process, without garbage collection, which would find
    nothing."""
    if _LAST in sys.modules:
        return
    gc.disable()
    import transformers.modeling_layers  # noqa: F401 - needed by each architecture
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401 - loaded when named
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("")  # compiles hundreds of patterns, once in a process

    import trainer_service.backends.fsdp2
    import trainer_service.compute.process_group
    import trainer_service.service.hosted_runs  # noqa: F401 - the last one: `_LAST`

    gc.freeze()
    gc.enable()


def import_before_forks() -> None:
    """Import the libraries in a process that will fork into ranks, each with its own GPUs.

    A library asks at its import whether there is a GPU. The usual check would start CUDA, which no
    forked process can use."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import_libraries()
