"""Reads a record without a database: the run's row, and the index of its metrics and rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import orjson

from gateway.runs.record.files import Kind, Place, read_lines
from gateway.runs.record.metrics import MetricsRow
from gateway.runs.record.progress import RecordIndex
from gateway.runs.record.rollouts import BATCH_BYTES, BATCH_ID, RolloutBatch, batch_of, reward_of

_ALL = 2**62


class _RolloutLine(NamedTuple):
    batch: str
    place: Place
    step: int
    size: int
    reward: float | None


def read_identity(folder: Path) -> Mapping[str, object] | None:
    """Return the columns of a run's row, or None if its file is missing or damaged."""
    with suppress(OSError, ValueError):
        row = orjson.loads((folder / "run.json").read_bytes())
        return row if isinstance(row, dict) else None
    return None


def read_index(folder: Path, run_id: str) -> tuple[RecordIndex, list[RolloutBatch]]:
    """Return the index of a record. Damaged lines do not count. Raises `OSError`."""
    index = RecordIndex(run_id)
    for line, _ in _lines(folder, "metrics"):
        with suppress(ValueError, TypeError, LookupError, AttributeError):
            said = orjson.loads(line)
            at, by_user = float(said["at"]), said["source"] == "user"
            row = MetricsRow(int(said["step"]), dict(said["values"]), at)
            index = replace(index, updated_at=at, bytes=index.bytes + len(line))
            index = index.with_rows([row], row.values, by_user=by_user)
    batches = _batches(folder, run_id)
    rollouts = sum(batch.count for batch in batches)
    size = index.bytes + sum(BATCH_BYTES + batch.bytes for batch in batches)
    return replace(index, rollouts=rollouts, bytes=size), batches


def _batches(folder: Path, run_id: str) -> list[RolloutBatch]:
    """Return the batches in the order of writing. The lines of a batch are together in a segment. A
    batch that was written again, in another segment, replaces its earlier copy."""
    found: dict[str, RolloutBatch] = {}
    groups = groupby(
        _rollout_lines(folder), key=lambda line: (line.batch, line.place.file("rollouts"))
    )
    for (batch, _), group in groups:
        lines = [*group]
        found.pop(batch, None)
        sizes = [(line.size, line.reward) for line in lines]
        found[batch] = batch_of(run_id, batch, lines[0].step, lines[0].place, sizes)
    return [*found.values()]


def _rollout_lines(folder: Path) -> Iterator[_RolloutLine]:
    for line, place in _lines(folder, "rollouts"):
        with suppress(ValueError, TypeError, LookupError):
            rollout = orjson.loads(line)
            batch, step, reward = rollout[BATCH_ID], rollout["step"], reward_of(rollout)
            yield _RolloutLine(str(batch), place, int(step), len(line), reward)


def _lines(folder: Path, kind: Kind) -> Iterator[tuple[bytes, Place]]:
    """Yield each line and its beginning."""
    for lines, end in read_lines(folder, kind, Place(), most_bytes=_ALL):
        offset = end.offset - sum(map(len, lines))
        for line in lines:
            yield line, end._replace(offset=offset)
            offset += len(line)
