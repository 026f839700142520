"""The resources of one run: seconds, processors, devices, memory, tokens and bytes.

Several runs may share a trainer or an engine. Each gets the part of its computing seconds."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from sqlalchemy import RowMapping, case, func, select

from gateway.storage.database import Database
from gateway.storage.tables import checkpoints, run_records, runs, usage, worker_use

WORKER_SUMS = (
    "queue_seconds",
    "start_seconds",
    "run_seconds",
    "measured_seconds",
    "cpu_seconds",
    "gpu_measured_seconds",
    "gpu_shared_seconds",
    "gpu_seconds",
)
"""The columns of `worker_use` that only grow."""


@dataclass(frozen=True, kw_only=True)
class WorkerUse:
    """A run's part of its trainer, or of its engines together.

    The workers waited for `queue_seconds`, started for `start_seconds` and were awake for
    `run_seconds`. Runs may share workers. `share` is this run's part of their computing, and
    `compute_seconds` its own computing. `duty` is `compute_seconds` by `run_seconds`.
    `cpu_seconds`, `cpu_average` (in cores) and `gpu_average` are the run's part. Peaks are those
    of the workers. Utilisation is from 0 to 1. It is `measured` of the workers' processes
    (`process`), or of their devices while awake, with other processes on them (`shared`). Unknown
    values are null."""

    queue_seconds: float
    start_seconds: float
    run_seconds: float
    compute_seconds: float
    duty: float | None
    share: float
    cpu_seconds: float | None
    cpu_average: float | None
    memory_peak_bytes: int | None
    gpu_average: float | None
    gpu_peak: float | None
    gpu_memory_peak_bytes: int | None
    measured: str | None


@dataclass(frozen=True, kw_only=True)
class RunUse:
    """`trainer` and `sampler` are null without such workers. The run trained `training_tokens`.
    Samples from its weights read `prompt_tokens`, `cached_tokens` of them from the prefix cache,
    and returned `sampled_tokens`."""

    run_id: str
    trainer: WorkerUse | None
    sampler: WorkerUse | None
    training_tokens: int
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    checkpoint_bytes: int
    record_bytes: int


async def read_run_use(database: Database, run_id: str) -> RunUse:
    """Return the use of an existing run."""
    await database.flush()
    (run,) = await database.read(select(runs).where(runs.c.id == run_id))
    host, session_id, model = run["host"] or run_id, run["session_id"], run["base_model"]
    ranks = (run["asks"] or {}).get("ranks", 1)
    together = select(runs.c.id).where((runs.c.host == host) | (runs.c.id == host))
    sampled = usage.c.event == "sample"
    own = usage.c.run_id == run_id
    session = (usage.c.session_id == session_id) & (usage.c.base_model == model)
    seconds = usage.c.accelerator_seconds
    sums = {
        "training_tokens": case((own & ~sampled, usage.c.input_tokens), else_=0),
        "prompt_tokens": case((own & sampled, usage.c.input_tokens), else_=0),
        "cached_tokens": case((own & sampled, usage.c.cached_tokens), else_=0),
        "sampled_tokens": case((own & sampled, usage.c.output_tokens), else_=0),
        "trained": case((own & ~sampled, seconds), else_=0.0),
        "trained_by_all": case((~sampled, seconds), else_=0.0),
        "sampled": case((own & sampled & session, seconds), else_=0.0),
        "sampled_by_all": case((sampled & session, seconds), else_=0.0),
    }
    (used,) = await database.read(
        select(
            *(func.coalesce(func.sum(each), 0).label(name) for name, each in sums.items())
        ).where(usage.c.run_id.in_(together) | session)
    )
    workers = await database.read(
        select(worker_use).where(
            (worker_use.c.key == host) | (worker_use.c.session_id == session_id)
        )
    )
    lora = run["training"].get("lora") is not None
    engine = re.compile(rf"{re.escape(f'{session_id}/{model}')}/{'[1-9]' if lora else '0'}")
    expires_at = checkpoints.c.expires_at
    stored = await database.read_value(
        select(func.coalesce(func.sum(checkpoints.c.bytes), 0)).where(
            checkpoints.c.run_id == run_id, expires_at.is_(None) | (expires_at > time.time())
        )
    )
    record = await database.read(select(run_records.c.bytes).where(run_records.c.run_id == run_id))
    return RunUse(
        run_id=run_id,
        trainer=_part(
            [row for row in workers if row["key"] == host],
            float(used["trained"]) / ranks,
            float(used["trained_by_all"]) / ranks,
        ),
        sampler=_part(
            [row for row in workers if row["kind"] == "engine" and engine.match(row["key"])],
            float(used["sampled"]) / ranks,
            float(used["sampled_by_all"]) / ranks,
        ),
        checkpoint_bytes=int(stored),
        record_bytes=sum(row["bytes"] for row in record),
        **{name: int(used[name]) for name in list(sums)[:4]},
    )


def _part(rows: list[RowMapping], own: float, of_all: float) -> WorkerUse | None:
    """Return a run's part of these workers, which computed `own` of `of_all` seconds for it."""
    if not rows:
        return None
    share = own / of_all if of_all else 0.0
    total = {name: sum(row[name] for row in rows) for name in WORKER_SUMS}
    run_seconds, measured = total["run_seconds"], total["measured_seconds"]
    cpu_seconds = total["cpu_seconds"] * share if measured else None
    shared = total["gpu_shared_seconds"]
    of_devices = total["gpu_measured_seconds"] + shared
    peaks = {
        name: max((row[name] for row in rows if row[name] is not None), default=None)
        for name in ("memory_peak", "gpu_peak", "gpu_memory_peak")
    }
    return WorkerUse(
        queue_seconds=total["queue_seconds"],
        start_seconds=total["start_seconds"],
        run_seconds=run_seconds,
        compute_seconds=own,
        duty=min(1.0, own / run_seconds) if run_seconds else None,
        share=share,
        cpu_seconds=cpu_seconds,
        cpu_average=cpu_seconds / measured if cpu_seconds is not None else None,
        memory_peak_bytes=_whole(peaks["memory_peak"]),
        gpu_average=total["gpu_seconds"] * share / of_devices if of_devices else None,
        gpu_peak=peaks["gpu_peak"],
        gpu_memory_peak_bytes=_whole(peaks["gpu_memory_peak"]),
        measured=("shared" if shared else "process") if of_devices else None,
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
