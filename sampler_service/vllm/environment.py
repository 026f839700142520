"""Sets the environment that lets vLLM start fast and stay quiet, so that users need not.

Most variables are read when a library is imported or loaded, so the process replaces itself once,
with the right environment, before it reads its specification.

Measured with vLLM 0.32 on two cores: an engine process of its own, compiled kernels and two OpenMP
threads cost 20 s at the start and a factor of 15 in speed.
"""

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
    # vLLM's core is where our engine is: in this process, or in one that we start ourselves
    # (`service/engine_process.py`).
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Weights come from directories; nothing is fetched or reported.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # One process computes and still listens for others: restrict it to this machine.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # vLLM's messages go through our log, as JSON, from warnings on.
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}
_CPU = {
    # More OpenMP threads than one spin against each other inside one engine process. With two, a
    # sequence's logprobs also depend on its batch, so that a seed no longer repeats its samples.
    "OMP_NUM_THREADS": "1",
    # Intel's OpenMP would give the engine's thread the cores back that the process had when it was
    # loaded, which is before the process is confined to its worker's.
    "KMP_AFFINITY": "disabled",
    # Without affinity it does not survive a fork that it notices.
    "KMP_INIT_AT_FORK": "false",
    # By default vLLM pins the whole process, our servicer included, to one core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # One small function would be compiled at the first token, for seconds.
    "TORCHDYNAMO_DISABLE": "1",
}
_GPU = {
    # FlashInfer's sampler gives no logprobs after filters, for which each of our requests asks. So
    # vLLM would never use it, but imports it, and does not start without it.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
_ALLOCATOR = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""torch's settings for the host memory of a sleeping engine: eight threads clear its pages."""
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The first one counts; torch 2.11 and 2.13 both read the last."""


def restart_with_environment(arguments: list[str]) -> None:
    """Replace this process by itself with the right environment; return in the new process.

    File descriptors survive: standard input, still unread, and the report's.
    """
    if os.environ.pop(_MARK, None):
        return
    environment = sampler_environment(os.environ, cpu=is_cpu_build(), library=_intel_openmp())
    environment[_MARK] = "1"
    os.execve(sys.executable, [sys.executable, "-m", "sampler_service", *arguments], environment)


def sampler_environment(
    current: Mapping[str, str], *, cpu: bool, library: Path | None
) -> dict[str, str]:
    """Return the environment of the engine's process. `library`, Intel's OpenMP, is preloaded on a
    CPU."""
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
    """Set in this process what nothing has set: it imports an engine, and did not restart."""
    found = sampler_environment(os.environ, cpu=is_cpu_build(), library=None)
    for name, value in found.items():
        os.environ.setdefault(name, value)


def is_cpu_build() -> bool:
    """Whether vLLM's CPU build is installed, by the package metadata alone."""
    try:
        metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def choose_model_runner(settings: SamplerSettings) -> None:
    """Set the variable by which vLLM chooses, when an engine is made; on a GPU it is left to vLLM,
    unless the settings say it."""
    wanted = settings.model_runner
    if wanted == "auto" and is_cpu_build():
        wanted = "v1"  # without Triton vLLM has no other, and warns of it
    if wanted != "auto":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if wanted == "v2" else "0"


def in_own_process(settings: SamplerSettings) -> bool:
    """Whether the engine has a process of its own."""
    if settings.engine_process == "auto":
        return not is_cpu_build()
    return settings.engine_process == "on"


def _intel_openmp() -> Path | None:
    """The library of the `intel-openmp` package, if it is installed."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return library if library.is_file() else None
