"""Reads a record without a database: the run's row, and the index of its metrics and rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson

from gateway.runs.record.files import Kind, Place, read_lines
from gateway.runs.record.metrics import MetricsRow
from gateway.runs.record.progress import RecordIndex
from gateway.runs.record.rollouts import BATCH_BYTES, BATCH_ID, RolloutBatch, reward_of

_ALL = 2**62


@dataclass
class _Batch:
    """A batch while its lines are read."""

    place: Place
    step: int
    bytes: int = 0
    count: int = 0
    rewards: list[float] = field(default_factory=list)

    def finished(self, run_id: str, batch: str) -> RolloutBatch:
        rewards = self.rewards
        return RolloutBatch(
            run_id=run_id,
            batch=batch,
            step=self.step,
            file=self.place.file("rollouts"),
            offset=self.place.offset,
            bytes=self.bytes,
            count=self.count,
            rated=len(rewards),
            reward_min=min(rewards, default=None),
            reward_mean=sum(rewards) / len(rewards) if rewards else None,
            reward_max=max(rewards, default=None),
        )


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
    found: dict[str, _Batch] = {}
    last = ("", "")
    for line, place in _lines(folder, "rollouts"):
        with suppress(ValueError, TypeError, LookupError):
            rollout = orjson.loads(line)
            name, step = str(rollout[BATCH_ID]), int(rollout["step"])
            this = (name, place.file("rollouts"))
            if this != last:
                found.pop(name, None)
                found[name] = _Batch(place, step)
            last, batch = this, found[name]
            batch.bytes += len(line)
            batch.count += 1
            if (reward := reward_of(rollout)) is not None:
                batch.rewards.append(reward)
    return [batch.finished(run_id, name) for name, batch in found.items()]


def _lines(folder: Path, kind: Kind) -> Iterator[tuple[bytes, Place]]:
    """Yield each line and its beginning."""
    for lines, end in read_lines(folder, kind, Place(), most_bytes=_ALL):
        offset = end.offset - sum(map(len, lines))
        for line in lines:
            yield line, end._replace(offset=offset)
            offset += len(line)
