"""The environment variables that an agent and its workers inherit.

The environment of `tandem up` may hold secrets of other programs. A list of excluded names would
miss some, so this is a list of kept names. A kept variable is still dropped if its name is a
secret's, such as HF_TOKEN, or if its value is an address with a password."""

from __future__ import annotations

import re
from collections.abc import Mapping

_KEPT = re.compile(
    r"""
    # The system.
    PATH|HOME|USER|LOGNAME|SHELL|HOSTNAME|PWD|TZ|LANG|LANGUAGE|LC_.*|TMPDIR|TMP|TEMP|TERM
    |NO_COLOR|XDG_(CACHE|CONFIG|DATA)_HOME|XDG_RUNTIME_DIR
    # The loader, the allocator and the interpreter.
    |LD_.*|MALLOC_.*|GLIBC_.*|PYTHON.*|VIRTUAL_ENV|CONDA_PREFIX
    # Compilers, with which torch and Triton build kernels.
    |CC|CXX|CFLAGS|CXXFLAGS|LDFLAGS|CPATH|C_INCLUDE_PATH|CPLUS_INCLUDE_PATH|LIBRARY_PATH|MAX_JOBS
    # Devices, and the libraries by which they compute and speak with each other.
    |(CUDA|CUDNN|CUBLAS|NVIDIA|NVTE|NVSHMEM|NCCL|UCX|FI|GLOO|TP|GRPC)_.*
    # Arithmetic on cores.
    |(OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR|NUMBA|DNNL|ONEDNN)_.*
    # Libraries of models.
    |TORCH.*|(PYTORCH|TRITON|VLLM|FLASHINFER|FLASH_ATTENTION|HF|TRANSFORMERS)_.*
    |(TOKENIZERS|SAFETENSORS)_.*
    # Tandem's own, and so those of trainer backends that are installed beside it.
    |TANDEM_.*
    """,
    re.VERBOSE,
)
_SECRET = re.compile(
    r"TANDEM_DATABASE_.*"
    r"|.*(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|_PAT|_PASS|_PWD|_AUTH|_DSN)S?"
    r"(_ID|_FILE|_PATH)?",
    re.IGNORECASE,
)
_PASSWORD_IN_ADDRESS = re.compile(r"://[^/\s@]*:[^/\s]*@")


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if _KEPT.fullmatch(name)
        and not _SECRET.fullmatch(name)
        and not _PASSWORD_IN_ADDRESS.search(value)
    }
