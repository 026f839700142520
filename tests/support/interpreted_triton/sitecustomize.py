"""Lets vLLM's second model runner compute on a CPU: a Python that begins with this folder in its
path takes Triton's interpreter, which computes kernels with NumPy, for a compiler for CPUs."""

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import backends
from triton.runtime import interpreter

backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


class Number(int):
    """What a loop of a kernel counts by. The interpreter has plain numbers there, of which a
    compiler makes scalars that have a type."""

    def to(self, dtype):
        return self


patch = interpreter._patch_lang_core


def patch_with_numbers(lang, scope):
    patch(lang, scope)
    numbers = lang.range
    scope.set_attr(lang, "range", lambda *given, **named: map(Number, numbers(*given, **named)))


interpreter._patch_lang_core = patch_with_numbers
store = interpreter.InterpreterBuilder.create_masked_store


def store_by_booleans(builder, pointers, value, mask, cache_policy):
    """A truth that was combined with another may have come out as a number."""
    mask.data = mask.data.astype(bool)
    return store(builder, pointers, value, mask, cache_policy)


interpreter.InterpreterBuilder.create_masked_store = store_by_booleans
