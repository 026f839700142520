"""The workers of the groups and their queues, as far as a caller may see them.

Of another owner's workers a caller sees that there is one, what it does and its turn: without its
name, its session, its sizes or its times. An admin sees all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from gateway.owners.auth.identity import Caller
from gateway.placement.lease import Lease
from gateway.placement.leases import GroupLeases
from gateway.placement.places import Places
from gateway.placement.room import Place

Standing = Literal["awake", "giving_way", "falling_asleep", "waking", "waiting", "asleep", "absent"]
"""What a worker does on its group. `absent`: it has a place, and there is no process."""

_HOLDING = ("awake", "giving_way", "falling_asleep", "waking")
_STANDING: Mapping[str, Standing] = {
    "held": "awake",
    "waking": "waking",
    "giving_way": "giving_way",
    "sleeping": "falling_asleep",
}


@dataclass(frozen=True)
class Occupant:
    """A worker on a group. `position` is its turn among those that wait, from 1; 0: it does not.
    `seconds`: for so long it has had the devices, or has waited; `expected_seconds`: for so long
    it will wait, as things went lately. Bytes are those of its last switch."""

    state: Standing
    position: int = 0
    worker: str = ""
    kind: str = ""
    owner: str = ""
    session_id: str = ""
    seconds: float = 0.0
    expected_seconds: float = 0.0
    reason: str = ""
    device_seconds: float = 0.0
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0

    @property
    def holds(self) -> bool:
        return self.state in _HOLDING

    def for_caller(self, caller: Caller) -> Occupant:
        return self if caller.may_see(self.owner) else Occupant(self.state, self.position)


@dataclass(frozen=True)
class Applicant:
    """A run, or a sampler, that waits for its places."""

    position: int
    worker: str = ""
    owner: str = ""
    session_id: str = ""
    reason: str = ""

    def for_caller(self, caller: Caller) -> Applicant:
        return self if caller.may_see(self.owner) else Applicant(self.position)


def occupants(leases: GroupLeases, places: Iterable[Place], *, now: float) -> list[Occupant]:
    """Return the workers of a group: those that have the devices, those that wait, in turn, and
    the others. `now` is in the time of the event loop."""
    if not leases.awake:  # they have no leases
        return [
            Occupant(
                "awake",
                worker=place.key,
                kind=place.role,
                owner=place.owner,
                session_id=place.session_id,
            )
            for place in places
        ]
    queue = leases.queue()
    waiting = [
        _occupant(lease, now=now, position=number, expected=leases.expected_wait(number - 1))
        for number, lease in enumerate(queue, start=1)
    ]
    others = [_occupant(lease, now=now) for lease in leases.leases if lease not in queue]
    return sorted([*others, *waiting], key=lambda each: (not each.holds, not each.position))


def _occupant(lease: Lease, *, now: float, position: int = 0, expected: float = 0.0) -> Occupant:
    resting: Standing = "waiting" if position else "asleep" if lease.present else "absent"
    state = _STANDING.get(lease.state, resting)
    since = lease.granted_at if state != "waking" and state in _HOLDING else lease.since
    seconds = now - since if since else 0.0
    return Occupant(
        state,
        position=position,
        worker=lease.key,
        kind=lease.kind,
        owner=lease.owner,
        session_id=lease.session_id,
        seconds=seconds,
        expected_seconds=expected,
        reason=lease.explain(),
        device_seconds=lease.seconds + lease.group.accounts.running(lease),
        device_bytes=lease.residence.device_bytes,
        host_bytes=lease.residence.host_bytes,
        disk_bytes=lease.residence.disk_bytes,
    )


def applicants(places: Places) -> list[Applicant]:
    """Return who waits for places, the next one first."""
    return [
        Applicant(
            position,
            worker=ask.key,
            owner=ask.owner,
            session_id=ask.session_id,
            reason=places.queue.explain(ask.key),
        )
        for position, ask in enumerate(places.queue.waiting, start=1)
    ]
