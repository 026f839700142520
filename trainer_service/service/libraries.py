"""The imports that take most of a rank's start: torch and transformers, with what of them every
training run uses."""

from __future__ import annotations

import gc
import os

import numpy  # noqa: F401 - starts threads when imported, which must have their usual priority


def import_libraries() -> None:
    """Import them. The garbage collector would find nothing meanwhile, and take a fifth of the
    time; nor is what they leave ever garbage."""
    if gc.get_freeze_count():
        return  # they are there
    gc.disable()
    import transformers.modeling_utils  # noqa: F401 - needed by each architecture
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401 - loaded when named

    import trainer_service.backends.fsdp2
    import trainer_service.compute.process_group
    import trainer_service.service.hosted_runs  # noqa: F401

    gc.freeze()
    gc.enable()


def import_before_forks() -> None:
    """Import them in a process that will be several, each of which may see other GPUs. A library
    asks at its import whether there is one: asked in the usual way, CUDA would begin, which no
    forked process can use, and which reads the list of devices once."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import_libraries()
