"""Requests: the caller of `place` states the needs of one worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tandem.settings.sharing import Sharing

Kind = Literal["trainer", "engine", "job"]


def sampler_of(key: str) -> str:
    """Return the key of the sampler of the engine with this key."""
    return key.partition("#")[0]


@dataclass(frozen=True, kw_only=True)
class WorkerRequest:
    """A request for one worker.

    `device_bytes` is its need on each of its devices, and `host_bytes` its need on the host. 0 is
    an unknown need. `groups` are the allowed groups or families of groups. Without them, all are
    allowed. `sharing` is the asked way, None for that of the group. `together` has the keys of
    rows that get their groups at one moment with this one, or not at all. A placed trainer keeps
    the engines among them. `sampler` names the sampler of an engine, or that of a trainer's run.
    Two engines of one sampler never share a leased group. `model` is the path of its base
    model."""

    key: str
    kind: Kind
    owner: str
    session: str
    model: str = ""
    ranks: int = 1
    device_bytes: int = 0
    host_bytes: int = 0
    groups: tuple[str, ...] = ()
    sharing: Sharing | None = None
    priority: int = 0
    together: tuple[str, ...] = ()
    sampler: str = ""
    start_timeout: float = 300.0

    @property
    def run_name(self) -> str:
        """The name that a run's trainer and its engines have in common. Earlier gateways stored
        trainers without `sampler`."""
        return self.sampler or sampler_of((*self.together, self.key)[0])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> WorkerRequest:
        lists = {name: tuple(values[name]) for name in ("groups", "together")}
        sharing = values.get("sharing")
        return cls(**{**values, **lists, "sharing": Sharing(sharing) if sharing else None})
