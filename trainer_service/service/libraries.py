"""The imports that take most of a rank's start: torch and transformers, with what of them every
training run uses."""

from __future__ import annotations

import gc
import os
import sys

import numpy  # noqa: F401 - starts threads when imported, which must have their usual priority

_LAST = "trainer_service.service.hosted_runs"


_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
_PINNING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"


def set_environment() -> None:
    """Set what torch reads when it is imported, in this process and in those of its ranks."""
    # Waiting OpenMP threads must sleep: spinning, they take the cores from the gateway, the
    # sampler and each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Most of the time to pin memory goes into clearing its pages, which one thread does otherwise.
    if not any(map(os.environ.get, _ALLOCATOR)):
        os.environ[_ALLOCATOR[0]] = _PINNING


def import_libraries() -> None:
    """Import them, once in a process. The garbage collector would find nothing meanwhile, and take
    a fifth of the time. Their objects live as long as the process, so it never looks at them."""
    if _LAST in sys.modules:
        return
    gc.disable()
    import transformers.modeling_utils  # noqa: F401 - needed by each architecture
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401 - loaded when named

    import trainer_service.backends.fsdp2
    import trainer_service.compute.process_group
    import trainer_service.service.hosted_runs  # noqa: F401 - the last one: `_LAST`

    gc.freeze()
    gc.enable()


def import_before_forks() -> None:
    """Import them in a process that will be several, each of which may see other GPUs. A library
    asks at its import whether there is one: asked in the usual way, CUDA would begin, which no
    forked process can use, and which reads the list of devices once."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import_libraries()
