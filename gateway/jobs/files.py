"""The files of a job, in `DATA/jobs/RUN/`. `docs/design/jobs.md` lists them and their writers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.identifiers import run_folder_name
from gateway.jobs.job import Job
from gateway.runs.record.metrics import MetricsRow
from gateway.storage.data_directory import write_file
from tandem.backends.jobs import JobEnd
from tandem.backends.rendering import job_request
from tandem.tracking.names import SERVER
from tandem.weights.store import fsync_path, make_folder, read_record, write_synced

_READ_BYTES = 2**20
"""The most bytes of metrics that are read at once."""


def job_folder(data_dir: Path, run_id: str) -> Path:
    return data_dir / "jobs" / run_folder_name(run_id)


def write_data(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write a new job's data durably."""
    make_folder(folder / "data")
    for name, content in contents.items():
        write_synced(folder / "data" / f"{name}.jsonl", content)
    fsync_path(folder / "data")


def folders_of_data(data_dir: Path) -> list[Path]:
    """Return folders with data only. A job writes more as soon as it has a row."""
    return [
        folder
        for folder in (data_dir / "jobs").glob("*")
        if folder.is_dir() and all(each.name == "data" for each in folder.iterdir())
    ]


def write_request(job: Job) -> None:
    """Write `job.json`, which the program of the next attempt reads."""
    request = job_request(
        backend=job.plan.backend,
        configuration=job.plan.configuration,
        model=job.model.path,
        folder=str(job.folder),
        attempt=job.attempt,
        processes=job.plan.processes,
    )
    write_file(job.folder / "job.json", json.dumps(request, indent=1).encode(), synced=True)


def remove_files(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def was_begun(job: Job) -> bool:
    """Return whether the attempt has had a process. It makes the attempt's folder first."""
    return (job.folder / f"attempt-{job.attempt}").exists()


def read_world(folder: Path, attempt: int) -> list[dict[str, Any]]:
    """Return each rank's line about itself. Other JSON is left out. Raises `OSError`,
    `ValueError` and `RecursionError`."""
    try:
        content = read_record(folder / f"attempt-{attempt}" / "world.jsonl")
    except FileNotFoundError:
        return []
    rows = map(json.loads, content.splitlines())
    return [row for row in rows if isinstance(row, dict)]


def read_end(job: Job) -> JobEnd | None:
    """Return the end of the attempt, None while there is none. Raises `OSError` and
    `ValueError`."""
    try:
        file = job.folder / f"attempt-{job.attempt}" / "end.json"
        return JobEnd.model_validate_json(read_record(file))
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class ReadMetrics:
    """Rows of the metrics file, the bytes read so far, and the job's number of steps, if known."""

    rows: list[MetricsRow]
    offset: int
    steps: int | None


def read_metrics(folder: Path, attempt: int, offset: int) -> ReadMetrics:
    """Read complete lines behind an offset. A malformed line is left out. Raises `OSError`."""
    try:
        with (folder / f"attempt-{attempt}" / "metrics.jsonl").open("rb") as file:
            file.seek(offset)
            content = file.read(_READ_BYTES)
    except FileNotFoundError:
        return ReadMetrics([], offset, None)
    whole = content[: content.rfind(b"\n") + 1]
    rows, steps = list[MetricsRow](), None
    for line in whole.splitlines():
        try:
            found = json.loads(line)
            values = {f"{SERVER}{name}": float(value) for name, value in found["values"].items()}
            rows.append(MetricsRow(int(found["step"]), values))
            steps = int(found["steps"]) if found.get("steps") else steps
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            continue
    return ReadMetrics(rows, offset + len(whole), steps)
