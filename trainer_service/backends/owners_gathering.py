"""Gathers what is sharded on CPUs, each part on the rank that writes it alone.

Rows go from where a rank keeps them straight to where the receiver wants them, and the receiver
has one place for all parts, one after the other: new memory costs a processor more than what is
put into it, since the system clears it page by page. What a rank has for others it offers as soon
as it can, so that nobody waits while another writes; it is sent once its receiver asks for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch import Tensor

_MOST_COPIES = 64 * 2**20
"""Bytes that a rank holds for others besides its shards, where those are of another type."""


class OwnersGathering:
    """Gathers parts of a model, each on its owner, in an order that all ranks share. `parts`:
    each part's owner, by its rank in the mesh, and its parameters, sharded by rows.

    Use, on every rank: `next(0)`, `next(1)`, … to the last part, then `end()`.
    """

    def __init__(
        self, parts: Sequence[tuple[int, Sequence[nn.Parameter]]], *, dtype: torch.dtype
    ) -> None:
        self._parts = [(owner, [_sharded(each) for each in part]) for owner, part in parts]
        self._dtype = dtype
        self._group = self._parts[0][1][0].device_mesh.get_group()
        self._rank, self._size = dist.get_rank(self._group), dist.get_world_size(self._group)
        mine = [sum(map(torch.Tensor.numel, part)) for o, part in self._parts if o == self._rank]
        self._room = torch.empty(max(mine, default=0), dtype=dtype)
        self._offered = 0
        self._sends: deque[tuple[dist.Work, Tensor, int]] = deque()
        self._copied = 0

    def next(self, place: int) -> list[Tensor]:
        """Returns the parameters of a part, whole, if this rank owns it; they are there until the
        next call."""
        self._offer(place)
        owner, part = self._parts[place]
        if owner != self._rank:
            return []
        whole: list[Tensor] = []
        receipts: list[dist.Work] = []
        sizes = [parameter.numel() for parameter in part]
        for parameter, room in zip(part, self._room[: sum(sizes)].split(sizes), strict=True):
            whole.append(room.view(parameter.shape))
            for rank, rows in enumerate(whole[-1].split(self._rows_of(parameter))):
                if rank == self._rank:
                    rows.copy_(parameter.to_local().detach())
                else:
                    receipt = dist.irecv(rows, group=self._group, group_src=rank, tag=place)
                    assert receipt is not None
                    receipts.append(receipt)
        for receipt in receipts:
            receipt.wait()
        return whole

    def end(self) -> None:
        """Returns when all that this rank had for others has been taken."""
        while self._sends:
            self._wait_for_oldest()

    def _offer(self, place: int) -> None:
        """Offers what this rank has of the parts up to this one, and of later ones as far as the
        copies allow.

        Ranks cannot wait for each other in a circle: one that waits here, at this part, waits for
        the owner of an earlier part, or of this one, which has taken it by then or comes to it
        without waiting for a later one.
        """
        while self._offered < len(self._parts):
            if self._copied >= _MOST_COPIES:
                if self._offered > place:
                    return
                self._wait_for_oldest()
                continue
            owner, part = self._parts[self._offered]
            for parameter in part if owner != self._rank else []:
                self._send(parameter, owner, tag=self._offered)
            self._offered += 1

    def _send(self, parameter: DTensor, owner: int, *, tag: int) -> None:
        kept = parameter.to_local().detach()
        if not kept.numel():  # the last ranks may have no rows
            return
        sent = kept.to(self._dtype).contiguous()
        work = dist.isend(sent, group=self._group, group_dst=owner, tag=tag)
        assert work is not None
        copied = sent.nbytes if sent.data_ptr() != kept.data_ptr() else 0
        self._sends.append((work, sent, copied))
        self._copied += copied

    def _wait_for_oldest(self) -> None:
        work, _, copied = self._sends.popleft()
        work.wait()
        self._copied -= copied

    def _rows_of(self, parameter: DTensor) -> int:
        """How many rows each rank has, but for the last ones."""
        return max(1, int(-(-parameter.shape[0] // self._size)))


def _sharded(parameter: nn.Parameter) -> DTensor:
    assert isinstance(parameter, DTensor)
    return parameter
