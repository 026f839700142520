"""Places on the groups of a machine on which none are declared, without a database; some of them
an earlier gateway may have given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.placement.groups import DeviceGroup, groups_of
from gateway.placement.places import Places
from gateway.storage.tables import places as table
from tandem.host import Host
from tandem.settings import GatewaySettings

WHOLE_MACHINE = groups_of(GatewaySettings(), Host("host", cores=(0, 1)))


class Rows:
    def __init__(self, left: Sequence[dict[str, object]]) -> None:
        self.left = left

    async def read(self, query):
        return self.left if query.get_final_froms() == [table] else []

    def write_soon(self, *_statement): ...

    async def write_together(self, *statements): ...

    async def flush(self) -> bool:
        return True


def places_for(settings: GatewaySettings, left: Sequence[dict[str, object]] = ()) -> Places:
    return _places(
        left,
        most_engines=settings.max_engines,
        most_starting=settings.max_starting_engines,
        quantum=settings.engine_quantum,
    )


def _places(left: Sequence[dict[str, object]] = (), **limits: Any) -> Places:
    rows: Any = Rows(left)
    return Places(database=rows, **limits)


async def open_on(places: Places, *groups: DeviceGroup) -> Places:
    await places.open(groups, host_memory_bytes=0, is_wanted=lambda _place: True)
    return places


async def open_places(**limits: Any) -> Places:
    return await open_on(_places(**limits), *WHOLE_MACHINE)
