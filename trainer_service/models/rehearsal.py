"""What a computation would hold in memory, found out without any: it runs on torch's `meta` device,
where tensors have shapes and nothing else, while it is noted what comes and goes.

So everything is counted as the code has it: what autograd keeps, blocks that are computed again,
logits in chunks, gradients, what each operation makes on the way. Three things are put right, since
the `meta` device computes them in another way than a CPU or a GPU: attention keeps no probabilities
[T, T] (its flash kernels do not), grouped products of experts need no bfloat16, and questions about
values are answered with yes, as those whether positions just count up. And one thing that autograd
does in another way while operations are noted: gradients that are added up, which it otherwise adds
in place.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer_service.models.heap import Trace

if TYPE_CHECKING:
    from torch import Tensor

_ATEN = torch.ops.aten
_References = tuple[int, int]


def trace_of(compute: Callable[[], object], *, besides: Iterable[Tensor]) -> Trace:
    """What comes and goes while `compute` runs on `meta`, without the tensors `besides`."""
    living = _Living(besides, sole=_sole_references())
    with _FlashAttention(), living:
        compute()
    return tuple(living.trace)


class _Living(TorchDispatchMode):  # type: ignore[misc]  # torch is Any to mypy
    """Traces storages from the operation that makes them to their end."""

    def __init__(self, besides: Iterable[Tensor], *, sole: _References | None) -> None:
        super().__init__()
        self.trace: list[tuple[int, int]] = []
        self._besides = [tensor.untyped_storage() for tensor in besides]
        self._known = {storage._cdata for storage in self._besides}
        self._results: dict[object, list[_Shape]] = {}
        self._sole, self.seen = sole, list[_References]()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is _ATEN._local_scalar_dense.default and args[0].is_meta:
            return 1
        if func is _ATEN.add.Tensor and _sums_gradients(args, kwargs):
            self.seen = [_references(each) for each in args]
            for gradient, other in (args, args[::-1]):
                if _references(gradient) == self._sole and _is_dense(gradient):
                    return gradient.add_(other)
        result = self._result_of(func, args, kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) in self._known:
            return
        self._known.add(key)
        which, size = len(self.trace), storage.nbytes()
        self.trace.append((which, size))
        weakref.finalize(storage, self._end, key, which, size)

    def _end(self, key: int, which: int, size: int) -> None:
        self._known.discard(key)
        self.trace.append((which, -size))

    def _result_of(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> object:
        """What an operation makes: torch takes long to find its shape, which is the same in every
        block of a model."""
        if not _makes_tensors(func):
            return func(*args, **kwargs)
        key = (func, *(_shape_of(each) for each in tree_leaves((args, kwargs))))
        if (shapes := self._results.get(key)) is None:
            made = _compute(func, args, kwargs)
            found = made if isinstance(made, tuple) else (made,)
            if all(isinstance(each, torch.Tensor) and each.is_meta for each in found):
                self._results[key] = [_shape_of(each) for each in found]
            return made
        tensors = [
            torch.empty_strided(size, stride, dtype=dtype, device="meta")
            for dtype, size, stride in shapes
        ]
        return tensors[0] if len(func._schema.returns) == 1 else tuple(tensors)


def _sums_gradients(args: Any, kwargs: object) -> bool:
    """Whether an addition may be one of those in which autograd adds up gradients of the same thing
    (`input_buffer.cpp`). A formula may add, too; what it adds is rarely held by it alone."""
    return (
        not kwargs
        and not torch.is_grad_enabled()
        and torch._C._current_autograd_node() is not None
        and all(type(each) is torch.Tensor for each in args)
        and args[0].shape == args[1].shape
        and args[0].dtype == args[1].dtype
    )


@functools.cache
def _sole_references() -> _References:
    """Of a gradient that autograd alone holds, seen while operations are noted. It depends on
    torch's version, and so is looked at."""
    with torch.enable_grad(), _Living((), sole=None) as noted:
        leaf = torch.ones((), requires_grad=True)
        torch.autograd.grad(leaf.sin() + leaf.cos(), leaf)
    found: _References = noted.seen[0]
    return found


def _references(tensor: Tensor) -> _References:
    """To the tensor and to its storage."""
    storage = tensor.untyped_storage()
    of_tensor, of_storage = tensor._use_count(), torch._C._storage_Use_Count(storage._cdata)
    return int(of_tensor), int(of_storage)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements are all apart, without gaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


_Shape = Any
"""Of a tensor, its type, size and strides; anything else is itself."""


def _shape_of(value: object) -> _Shape:
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape), value.stride())
    return (type(value), value)


def _makes_tensors(func: Any) -> bool:
    """Whether all that an operation returns is new tensors."""
    schema = func._schema
    returns: Sequence[Any] = schema.returns
    return (
        bool(returns)
        and not schema.is_mutable
        and all(each.alias_info is None and str(each.type) == "Tensor" for each in returns)
    )


def _compute(func: Any, args: Any, kwargs: Mapping[str, Any]) -> object:
    if func is _ATEN._grouped_mm.default and args[0].is_meta:
        return _grouped_product(*args, **kwargs)
    return func(*args, **kwargs)


def _grouped_product(
    left: Tensor, right: Tensor, offs: Tensor | None = None, **others: object
) -> Tensor:
    """Of rows [S, in] by expert with weights [E, in, out]; or, for the gradient of these, of
    [in, S] with [S, out]."""
    if left.ndim == right.ndim == 2 and offs is not None:
        return left.new_empty(len(offs), left.shape[0], right.shape[1])
    if left.ndim == 2:
        return left.new_empty(left.shape[0], right.shape[-1])
    return left.new_empty(left.shape[1], right.shape[-1])


class _FlashAttention(TorchFunctionMode):  # type: ignore[misc]
    """Computes torch's attention by a kernel that keeps its results and sums alone. On `meta`,
    torch would take the other one."""

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is scaled_dot_product_attention:
            return _flash(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    found: tuple[Tensor, ...] = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    return found[0]
