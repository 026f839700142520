"""Rollouts of a run: their lines in the files, and pages of one step by reward or text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import orjson

from gateway.runs.record.curves import as_json
from gateway.runs.record.files import Place, place_in

Order = Literal["reward", "-reward", "given"]
MAX_ROLLOUT = 2**20
"""Bytes of a rollout as JSON."""
BATCH_BYTES = 200
"""A batch's share of the record for its row, so that small batches have a limit too."""
_PAGE_BYTES = 16 * 2**20
_MOST_FOUND = 100_000
"""A record may have millions of short rollouts."""
BATCH_ID = "batch_id"
"""The field with the client's key of the batch. A batch that was written twice counts once."""

Rollout = Mapping[str, object]


@dataclass(frozen=True)
class RolloutBatch:
    """A row of `rollout_batches`: the lines of a batch and the rewards in it."""

    run_id: str
    batch: str
    step: int
    file: str
    offset: int
    bytes: int
    count: int
    rated: int
    reward_min: float | None
    reward_mean: float | None
    reward_max: float | None

    @property
    def place(self) -> Place:
        return place_in(self.file, self.offset)


def batch_of(
    run_id: str,
    batch: str,
    step: int,
    place: Place,
    lines: Sequence[tuple[int, float | None]],
) -> RolloutBatch:
    """Return the row of a batch whose lines begin at `place`. Each has its bytes and its reward."""
    rewards = [reward for _, reward in lines if reward is not None]
    return RolloutBatch(
        run_id=run_id,
        batch=batch,
        step=step,
        file=place.file("rollouts"),
        offset=place.offset,
        bytes=sum(size for size, _ in lines),
        count=len(lines),
        rated=len(rewards),
        reward_min=min(rewards, default=None),
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        reward_max=max(rewards, default=None),
    )


@dataclass(frozen=True)
class RolloutStep:
    """The rewards are null if no rollout of the step has one."""

    step: int
    count: int
    reward_min: float | None
    reward_mean: float | None
    reward_max: float | None


@dataclass(frozen=True)
class RolloutPage:
    """`steps` are the newest 1000 steps with rollouts, in order. `before` fetches earlier ones.
    Each rollout has its fields and its `index` in the step. `total_count` counts the matching
    rollouts of the step."""

    steps: Sequence[RolloutStep]
    step: int | None
    rollouts: Sequence[Rollout]
    total_count: int


def lines_of_rollouts(
    rollouts: Sequence[Rollout], *, step: int, batch: str, at: float
) -> list[tuple[bytes, float | None]]:
    """Return each rollout's line and its finite reward, without too large or deep ones. Numbers
    that are not finite become text in `reward` and `advantage`, and null in lists."""
    found = []
    for rollout in rollouts:
        row = {"at": at, **rollout, "step": step, BATCH_ID: batch}
        for name in ("reward", "advantage"):
            if isinstance(value := row.get(name), float):
                row[name] = as_json(value)
        with suppress(orjson.JSONEncodeError):  # an integer beyond 64 bits, or too deep a nesting
            line = orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
            if len(line) <= MAX_ROLLOUT:
                found.append((line, reward_of(rollout)))
    return found


def reward_of(rollout: Rollout) -> float | None:
    value = rollout.get("reward")
    known = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if known and isinstance(value, int | float) else None


def read_page(
    folder: Path,
    batches: Sequence[RolloutBatch],
    *,
    order: Order,
    search: str,
    limit: int,
    offset: int,
    stopped: Callable[[], bool],
) -> tuple[list[Rollout], int]:
    """Return a page of a step's rollouts and the number of all that match. The text `search` is
    somewhere in a rollout, in any case. Rollouts without a reward come last. A page ends early
    after 16 MiB, or when `stopped`. Pages by reward or text end after 100,000 rollouts. Raises
    `OSError`."""
    wanted = search.casefold()
    if order == "given" and not wanted:
        first = islice(_lines(folder, batches, offset, stopped), limit)
        page = _page((index, line) for index, _, _, line in first)
        return page, sum(batch.count for batch in batches)
    count = 0

    def matching() -> Iterator[_Found]:
        nonlocal count
        for index, batch, place, line in _lines(folder, batches, 0, stopped):
            rollout = _parsed(line)
            if not wanted or _contains(rollout, wanted):
                count += 1
                yield _Found(reward_of(rollout), index, batch, place, len(line))

    sign = {"given": 0, "reward": 1, "-reward": -1}[order]
    chosen = nsmallest(min(offset + limit, _MOST_FOUND), matching(), key=partial(_rank, sign))
    lines = ((one.number, _read(folder, one)) for one in chosen[offset:])
    return _page(lines), count


class _Found(NamedTuple):  # a tuple for less memory
    """A matching line: its number in the step, its batch, and its place and length in the file."""

    reward: float | None
    number: int
    batch: RolloutBatch
    place: int
    length: int


def _rank(sign: int, one: _Found) -> tuple[bool, float, int]:
    if not sign:
        return False, 0.0, one.number
    return one.reward is None, sign * (one.reward or 0.0), one.number


def _page(lines: Iterable[tuple[int, bytes]]) -> list[Rollout]:
    page: list[Rollout] = []
    size = 0
    for index, line in lines:
        size += len(line)
        if page and size > _PAGE_BYTES:
            break
        fields = {name: value for name, value in _parsed(line).items() if name != BATCH_ID}
        page.append({**fields, "index": index})
    return page


def _read(folder: Path, one: _Found) -> bytes:
    with (folder / one.batch.file).open("rb") as stream:
        stream.seek(one.place)
        return stream.read(one.length)


def _lines(
    folder: Path, batches: Sequence[RolloutBatch], first: int, stopped: Callable[[], bool]
) -> Iterator[tuple[int, RolloutBatch, int, bytes]]:
    """Yield each line from the index `first` on, with its index, batch and place in the file."""
    after = 0
    for batch in batches:
        index, after = after, after + batch.count
        if after <= first:
            continue
        place, end = batch.offset, batch.offset + batch.bytes
        with (folder / batch.file).open("rb") as stream:
            stream.seek(place)
            while place < end and not stopped() and (line := stream.readline()):
                if index >= first:
                    yield index, batch, place, line
                place += len(line)
                index += 1


def _parsed(line: bytes) -> Rollout:
    try:
        rollout = orjson.loads(line)
    except ValueError:  # damaged on the disk
        return {}
    return rollout if isinstance(rollout, dict) else {}


def _contains(value: object, wanted: str) -> bool:
    if isinstance(value, str):
        return wanted in value.casefold()
    if isinstance(value, Mapping):
        return any(_contains(one, wanted) for one in value.values())
    if isinstance(value, list):
        texts = (one for one in value if not isinstance(one, int | float))
        return any(_contains(one, wanted) for one in texts)
    return False
