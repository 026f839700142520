"""The operations on tensors that need more care than calling torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

_TENSOR_ATTRIBUTES: Mapping[str, Callable[[Tensor], object]] = MappingProxyType(
    {
        "T": lambda tensor: tensor.T,
        "mT": lambda tensor: tensor.mT,
        "shape": lambda tensor: tensor.shape,
        "ndim": lambda tensor: tensor.ndim,
        "dtype": lambda tensor: tensor.dtype,
        "device": lambda tensor: tensor.device,
    }
)
_PAIR_ATTRIBUTES: Mapping[str, int] = MappingProxyType({"values": 0, "indices": 1})


def attribute(owner: object, name: object) -> object:
    """One of `names.ATTRIBUTES`."""
    if isinstance(owner, Tensor) and isinstance(name, str) and name in _TENSOR_ATTRIBUTES:
        return _TENSOR_ATTRIBUTES[name](owner)
    if isinstance(owner, tuple) and isinstance(name, str) and name in _PAIR_ATTRIBUTES:
        # What max, min, sort, topk and their like return: a tuple of values and indices.
        return owner[_PAIR_ATTRIBUTES[name]]
    raise TypeError(f"a {type(owner).__name__} has no attribute {name!r} here")


def item(owner: object, index: object) -> object:
    """`owner[index]` for tensors and for tuples such as shapes."""
    if isinstance(owner, Tensor):
        return owner[index]
    if isinstance(owner, tuple | list) and isinstance(index, int | slice):
        return owner[index]
    raise TypeError(f"{type(owner).__name__}[{type(index).__name__}] is not allowed")


def explicit_index(index: object) -> object:
    """An index whose masks are replaced by the places they choose, so that the size of what it
    gives can be known before it is made."""
    entries = index if isinstance(index, tuple) else (index,)
    found: list[object] = []
    for entry in entries:
        if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
            if entry.ndim == 0:
                raise IndexError("a mask of no dimensions is not allowed as an index")
            found.extend(entry.nonzero(as_tuple=True))
        else:
            found.append(entry)
    return tuple(found)


def check_masks(owner: object, index: object) -> None:
    """Masks must have the sizes of the dimensions that they choose from, which is no longer seen
    once they are made explicit. Raises `IndexError`."""
    if not isinstance(owner, Tensor):
        return
    entries = index if isinstance(index, tuple) else (index,)
    place = 0
    for number, entry in enumerate(entries):
        if entry is None:
            continue
        if entry is ...:
            later = [each for each in entries[number + 1 :] if each is not None]
            taken = sum(
                each.ndim
                if isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8)
                else 1
                for each in later
            )
            place = owner.ndim - taken
            continue
        if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
            chosen = owner.shape[place : place + entry.ndim]
            if entry.shape != chosen:
                raise IndexError(
                    f"a mask of shape {list(entry.shape)} does not fit the shape {list(chosen)}"
                )
            place += entry.ndim
        else:
            place += 1


def masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    """Both broadcast to one shape, as torch does."""
    tensor, mask = torch.broadcast_tensors(tensor, mask)
    return tensor[mask]


def numel(tensor: Tensor) -> int:
    return int(tensor.numel())


def to(tensor: Tensor, *wanted: object, **keywords: object) -> Tensor:
    """A tensor in another dtype, or in that of another tensor; its device stays."""
    for value in (*wanted, keywords.get("dtype"), keywords.get("other")):
        if isinstance(value, torch.dtype):
            return tensor.to(value)
        if isinstance(value, Tensor):
            return tensor.to(value.dtype)
    return tensor


def stay(tensor: Tensor, *_wanted: object, **_keywords: object) -> Tensor:
    return tensor
