"""Samples groups ahead of the trainer, in a bounded number of places.

A place is taken by a group from its first rollout until the weights that it trained are published.
So the places bound the held groups, and the age of their weights."""

from __future__ import annotations

import asyncio
import heapq
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence

import numpy as np

from tandem.rl.rollouts import Example, Group

ATTEMPTS = 3
"""How often an example is drawn whose rollouts fail."""
_LONGEST_PAUSE = 30.0
"""Seconds between two of these attempts."""

Collect = Callable[[int, Example, int], Awaitable[Group]]
"""Samples example NUMBER for the nth time: (number, example, n) → group."""


class RolloutsFailed(RuntimeError):
    """Too many examples in a row had no usable rollouts."""


class ExampleOrder:
    """The examples of a run by number: the dataset again and again, each epoch in an order that
    only depends on the seed and the epoch."""

    def __init__(self, dataset: Sequence[Example], *, seed: int, shuffle: bool) -> None:
        if not len(dataset):
            raise ValueError("the dataset is empty")
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: Sequence[int] = ()

    def __getitem__(self, number: int) -> Example:
        epoch, place = divmod(number, len(self._dataset))
        if not self._shuffle:
            return self._dataset[place]
        if epoch != self._epoch:
            random = np.random.default_rng([self._seed, epoch])
            self._order = random.permutation(len(self._dataset)).tolist()
            self._epoch = epoch
        return self._dataset[self._order[place]]


class Producer:
    """Draws examples in order and collects their groups in tasks of `tasks`.

    `cursor` is the next new number. `under_way` has earlier numbers that no batch has trained,
    with the attempts of each: at the start, those of a saved state. `dropped` counts groups by
    reason. Without `places` for a whole batch, a batch waits forever. `most` bounds the held groups
    further, for the last steps of a run."""

    def __init__(
        self,
        order: ExampleOrder,
        collect: Collect,
        *,
        tasks: asyncio.TaskGroup,
        places: int,
        needed: int,
        cursor: int = 0,
        under_way: Iterable[tuple[int, int]] = (),
        describe_failure: Callable[[], str] = str,
    ) -> None:
        self.cursor = cursor
        self.dropped: Counter[str] = Counter()
        self.places = self.most = places
        self._sampling = (0.0, 0)  # seconds of ready groups, and their number
        self._order = order
        self._collect = collect
        self._tasks = tasks
        self._needed = needed
        self._most_failures = 2 * places + 8
        self._describe_failure = describe_failure
        self._again = sorted(under_way)  # a heap
        self._attempts: dict[int, int] = {}  # of the held groups: running, ready, or in a batch
        self._ready: dict[int, Group] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._free = places
        self._failed_in_a_row = 0
        self._failing_since: float | None = None
        self._changed = asyncio.Event()

    @property
    def held(self) -> int:
        """The taken places."""
        return self.places - self._free

    @property
    def under_way(self) -> list[tuple[int, int]]:
        return sorted([*self._attempts.items(), *self._again])

    def take_sampling_seconds(self) -> float:
        """Return the mean time of the groups that became ready since the last call."""
        seconds, count = self._sampling
        self._sampling = (0.0, 0)
        return seconds / max(count, 1)

    def fill(self) -> None:
        """Start a group in each free place."""
        while self._free and self.held < self.most:
            self._free -= 1
            self._draw()

    async def take(self, count: int) -> list[Group]:
        """Wait for `count` groups, and return the earliest ones. They keep their places."""
        while len(self._ready) < count:
            self._changed.clear()
            await self._changed.wait()
        return [self._ready.pop(number) for number in sorted(self._ready)[:count]]

    def draw_again(self, group: Group) -> None:
        """Sample the example of a taken group again, in the same place."""
        heapq.heappush(self._again, (group.number, self._attempts.pop(group.number) + 1))
        self._draw()

    def finish(self, groups: Iterable[Group]) -> None:
        """Note that taken groups have served, and are never drawn again. They keep their places."""
        for group in groups:
            del self._attempts[group.number]

    def free(self, count: int) -> None:
        self._free += count
        self.fill()

    def cancel(self) -> None:
        """Cancel the running groups."""
        self._free = 0
        for task in self._running.values():
            task.cancel()

    def _draw(self) -> None:
        if self._again:
            number, attempt = heapq.heappop(self._again)
        else:
            number, attempt = self.cursor, 0
            self.cursor += 1
        self._attempts[number] = attempt
        self._running[number] = self._tasks.create_task(self._produce(number, attempt))

    async def _produce(self, number: int, first: int) -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            for attempt in range(first, first + ATTEMPTS):
                if attempt > first:
                    await asyncio.sleep(self._pause())
                self._attempts[number] = attempt
                group = await self._collect(number, self._order[number], attempt)
                if len(group.rollouts) >= self._needed:
                    self._failed_in_a_row, self._failing_since = 0, None
                    self._ready[number] = group
                    self._sampling = (self._sampling[0] + clock() - started, self._sampling[1] + 1)
                    self._changed.set()
                    return
                self.dropped["incomplete"] += 1
        finally:
            del self._running[number]
        self._give_up(number)

    def _pause(self) -> float:
        """Return the seconds until another attempt: the more, the longer nothing has succeeded. So
        an outage of a minute ends no loop."""
        now = asyncio.get_running_loop().time()
        if self._failing_since is None:
            self._failing_since = now
        return min(1.0 + 2 * (now - self._failing_since), _LONGEST_PAUSE)

    def _give_up(self, number: int) -> None:
        del self._attempts[number]
        self.dropped["given_up"] += 1
        self._failed_in_a_row += 1
        reason = self._describe_failure() or "unknown"
        if self._failed_in_a_row == 1:  # a loop without any success ends minutes later
            warnings.warn(f"an example was given up; the last failure: {reason}", stacklevel=2)
        if self._failed_in_a_row >= self._most_failures:
            raise RolloutsFailed(
                f"{self._failed_in_a_row} examples in a row had fewer than {self._needed} usable "
                f"rollouts in {ATTEMPTS} attempts each; the last failure: {reason}"
            )
        self._draw()
