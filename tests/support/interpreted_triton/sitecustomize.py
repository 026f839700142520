"""Lets vLLM's second model runner compute on a CPU.

With this folder first on Python's path, Triton's interpreter replaces a compiler for CPUs."""

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import backends
from triton.runtime import interpreter

backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


class Number(int):
    """A loop counter in a kernel. The interpreter uses plain numbers, a compiler typed scalars."""

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
    """A combination of booleans may be a number."""
    mask.data = mask.data.astype(bool)
    return store(builder, pointers, value, mask, cache_policy)


interpreter.InterpreterBuilder.create_masked_store = store_by_booleans
