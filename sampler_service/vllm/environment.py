"""Sets the environment for vLLM's fast and quiet start.

Libraries read most variables at their import. So the process replaces itself once, before it reads
its specification."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # this process replaces itself first
    from tandem.settings.workers import SamplerSettings

_MARK = "TANDEM_SAMPLER_ENVIRONMENT"
_ALWAYS = {
    # vLLM's core runs in our engine's process (`service/engine_process.py`).
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Weights come from directories. Nothing is downloaded or reported.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # vLLM listens even with one process. Restrict it to this machine.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # vLLM's warnings and errors go through our log, as JSON.
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}
_CPU = {
    # More OpenMP threads spin against each other. With two, logprobs also depend on the batch.
    "OMP_NUM_THREADS": "1",
    # Intel's OpenMP would reset the engine thread's cores to those before the confinement.
    "KMP_AFFINITY": "disabled",
    # With affinity disabled, it survives no fork that it notices.
    "KMP_INIT_AT_FORK": "false",
    # By default vLLM pins the whole process to one core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Otherwise a function is compiled at the first token, which takes seconds.
    "TORCHDYNAMO_DISABLE": "1",
}
_GPU = {
    # FlashInfer's sampler returns no logprobs after filters, which we need. vLLM would import it in
    # vain.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
_ALLOCATOR = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""torch's settings for the host memory of a sleeping engine. Eight threads clear its pages."""
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The first one takes precedence. torch 2.11 and 2.13 both read the last."""


def restart_with_environment(arguments: list[str]) -> None:
    """Replace this process by itself with the right environment. Returns in the new process.

    The unread standard input and the report's descriptor survive."""
    if os.environ.pop(_MARK, None):
        return
    environment = engine_environment() | {_MARK: "1"}
    os.execve(sys.executable, [sys.executable, "-m", "sampler_service", *arguments], environment)


def engine_environment() -> dict[str, str]:
    return sampler_environment(os.environ, cpu=is_cpu_build(), library=_intel_openmp())


def sampler_environment(
    current: Mapping[str, str], *, cpu: bool, library: Path | None
) -> dict[str, str]:
    """Return the engine's environment. On a CPU, `library` (Intel's OpenMP) is preloaded."""
    environment = {**current, **_ALWAYS}
    if cpu:
        environment |= _CPU
        if library is not None:
            preloaded = [p for p in current.get("LD_PRELOAD", "").split(":") if p]
            if str(library) not in preloaded:
                environment["LD_PRELOAD"] = ":".join([str(library), *preloaded])
        return environment
    environment |= _GPU
    if not any(current.get(name) for name in _ALLOCATOR_VARIABLES):
        environment[_ALLOCATOR_VARIABLES[-1]] = _ALLOCATOR
    return environment


def use_environment() -> None:
    """Set the unset variables, for an import of the engine without the restart."""
    found = sampler_environment(os.environ, cpu=is_cpu_build(), library=None)
    for name, value in found.items():
        os.environ.setdefault(name, value)


def is_cpu_build() -> bool:
    """Return whether vLLM's CPU build is installed. Reads only package metadata."""
    try:
        metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def choose_model_runner(settings: SamplerSettings) -> None:
    """Set the variable of vLLM's model runner. On a GPU, "auto" leaves the choice to vLLM."""
    wanted = settings.model_runner
    if wanted == "auto" and is_cpu_build():
        wanted = "v1"  # the only one without Triton, and vLLM would warn
    if wanted != "auto":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if wanted == "v2" else "0"


def in_own_process(settings: SamplerSettings) -> bool:
    if settings.engine_process == "auto":
        return not is_cpu_build()
    return settings.engine_process == "on"


def _intel_openmp() -> Path | None:
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return library if library.is_file() else None
