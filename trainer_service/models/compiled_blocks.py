"""Compiled blocks: `torch.compile` of each transformer block, once for all equal blocks.

Lengths and the layout of rows are variables of the compiled code. But a compiler divides loops by
the first sizes that it sees. These are always the sizes of `micro_batches_to_compile`, so that a
restored trainer has equal bits. The cache is `TORCHINDUCTOR_CACHE_DIR`."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from tandem.errors import WorkerStartFailed
from tandem.telemetry import get_log

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_KINDS = 64
"""Kinds of blocks, and of sizes that torch compiles as constants, such as an adapter's rank."""


_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_NO_COMPILER = (
    "compiled blocks need a {} compiler, and this machine has none: install {}, or create the run "
    "with tandem.compile=off"
)
_WITH_WINDOWS = "tandem_with_windows"


def check_compiler(device: str) -> None:
    if device != "cpu":
        # Triton compiles its kernel launchers with it.
        if not any(map(shutil.which, [os.environ.get("CC", "gcc"), "clang"])):
            raise WorkerStartFailed(_NO_COMPILER.format("C", "gcc"))
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise WorkerStartFailed(_NO_COMPILER.format("C++", "g++")) from error


def compile_blocks(blocks: Sequence[nn.Module], *, threads: int) -> None:
    """Compile each block's forward method. With several `threads`, they are processes."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    import torch.fx.experimental._config as shapes

    dynamo.specialize_float = True  # a block's numbers are constants
    dynamo.skip_fsdp_guards = False  # its adapters are not
    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = _KINDS
    dynamo.fail_on_recompile_limit_hit = True  # instead of running uncompiled
    shapes.use_duck_shape = False  # equal sizes may differ later
    functorch.autograd_cache_allow_custom_autograd_functions = True
    inductor.compile_threads = threads
    if (cache := os.environ.get(_CACHE)) and Path(cache).name != (mine := processor()):
        os.environ[_CACHE] = str(Path(cache, mine))
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=True)


def processor() -> str:
    """A name for processors like this one.

    torch compiles for the exact processor, but machines with other processors may share its cache.
    """
    told = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU ", "Features")
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    kind = "\n".join(line for line in lines if line.startswith(told))
    return hashlib.sha256(kind.encode()).hexdigest()[:12]


def mask_windows(model: PreTrainedModel) -> None:
    """Give the blocks of padded rows the mask of a sliding window, even for short rows.

    Transformers omits it there, and the first longer row would be compiled during an operation."""
    if model.config._attn_implementation != "sdpa":
        return  # other implementations always get a mask
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def mask(
        *, local_size: int | None = None, allow_is_causal_skip: bool = True, **others: object
    ) -> Tensor | None:
        made: Tensor | None = sdpa_mask(
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip and local_size is None,
            **others,
        )
        return made

    ALL_MASK_ATTENTION_FUNCTIONS.register(_WITH_WINDOWS, mask)
    ALL_ATTENTION_FUNCTIONS.register(_WITH_WINDOWS, sdpa_attention_forward)
    model.set_attn_implementation(_WITH_WINDOWS)


@contextmanager
def not_yet(compiled: bool) -> Iterator[None]:
    """Let compiled blocks run uncompiled while a model is tested."""
    if not compiled:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def compiling(architecture: str) -> Iterator[None]:
    """Log a compilation. Raises `WorkerStartFailed` if it fails."""
    from torch._dynamo.exc import TorchDynamoException

    log, began = get_log(), time.monotonic()
    log.info("compiling_blocks", architecture=architecture)
    try:
        yield
    except TorchDynamoException as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise WorkerStartFailed(
            f"the blocks of {architecture} cannot be compiled: {' '.join(lines[:2])[:300]}. "
            "Create the run with tandem.compile=off"
        ) from error
    log.info("blocks_compiled", seconds=round(time.monotonic() - began, 1))
