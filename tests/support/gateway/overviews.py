"""Overviews of workers, for tests of decisions."""

from __future__ import annotations

from typing import Any

from gateway.workers.groups import WorkerGroup
from gateway.workers.overview import Budgets, Demand, Overview, WorkerBytes
from gateway.workers.requests import WorkerRequest
from gateway.workers.table import WorkerRow
from tandem.settings.sharing import SharingSettings

NOW = 1000.0


def worker_group(name: str = "g", **changes: Any) -> WorkerGroup:
    values = {"kinds": frozenset({"trainer", "engine"}), "host": "here", "on_host": True}
    return WorkerGroup(name=name, **(values | changes))


def row(
    key: str,
    state: str = "waiting",
    group: str = "g",
    *,
    since: float = 900.0,
    ends_as: str = "placed",
    overtaken: int = 0,
    **request: Any,
) -> WorkerRow:
    """Return a row, of a trainer by default. Further arguments are for its request."""
    values = {"kind": "trainer", "owner": "ann", "session": "s"} | request
    process = "" if state in ("waiting", "placed") else f"{key}:1"
    return WorkerRow(
        request=WorkerRequest(key=key, **values),
        state=state,  # type: ignore[arg-type]
        group="" if state == "waiting" else group,
        process=process,
        since=since,
        ends_as=ends_as,  # type: ignore[arg-type]
        overtaken=overtaken,
    )


def waits(since: float = 990.0, **changes: Any) -> Demand:
    return Demand(waiting=1, waiting_since=since, **changes)


def overview(
    *rows: WorkerRow,
    groups: tuple[WorkerGroup, ...] = (),
    demand: dict[str, Demand] | None = None,
    sizes: dict[str, WorkerBytes] | None = None,
    budgets: Budgets | None = None,
    settings: SharingSettings | None = None,
    **changes: Any,
) -> Overview:
    return Overview(
        now=NOW,
        rows={each.key: each for each in rows},
        groups={each.name: each for each in groups or (worker_group(),)},
        settings=settings or SharingSettings(quantum=5, max_wait=60),
        budgets=budgets or Budgets(),
        demand=demand or {},
        bytes=sizes or {},
        **changes,
    )
