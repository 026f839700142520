"""The balancer chooses a request's engine, among a sampler's engines with room:

1. Engines with the request's version, or about to load it, come first. Another engine is chosen
   if no engine has the version, or if it is idle and the others are much busier.
2. Among these, the engine with the longest cached prefix of the prompt comes first, unless it
   is much busier than the least busy one.
3. Otherwise, the engine with the fewest tokens to compute.

An engine that refused a version gets no samples of it. If all engines refused it, its samples fail.

"Much busier" means more than twice as busy plus `_GROUP` such requests. An engine has room for
`most_samples`. Other requests wait here in order of arrival, so that a faster engine gets more.
The choice never changes an answer: a sample is a function of its request and weights."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar

from tandem.errors import TandemError
from tandem.v1 import sampler_pb2

_BLOCK = 32
"""Tokens per block of a prompt: a block of a CPU engine's prefix cache, two of a GPU engine's."""
_MOST_BLOCKS = 32_768
"""Remembered blocks: a million tokens."""
_UNBOUNDED = 512
"""Assumed tokens of a sample without a limit."""
_GROUP = 16
_TOKEN_BYTES = 4


class Candidate(Protocol):
    """A serving engine. `process` names its current process."""

    @property
    def process(self) -> str: ...

    @property
    def loaded(self) -> set[str]:
        """Full weights and adapters in its last answer."""
        ...


@dataclass(frozen=True)
class Work:
    """A request's work: `samples` (0: a load), and `tokens` in total including the prompt.
    `beginnings` are hashes of the prompt's prefixes, each one block longer. A load that is
    `in_flight` does not wait for room."""

    version: str
    samples: int = 0
    tokens: int = 0
    beginnings: tuple[int, ...] = ()
    in_flight: bool = False

    @property
    def loads(self) -> bool:
        return not self.samples

    @classmethod
    def of_request(cls, request: sampler_pb2.SampleRequest, *, beginnings: bool) -> Work:
        """Without `beginnings`, skip the prefix hashes, which matter only for several engines."""
        params, prompt = request.params, request.prompt_tokens
        samples = request.num_samples if params.temperature > 0 else 1
        longest = params.max_tokens if params.HasField("max_tokens") else _UNBOUNDED
        return cls(
            version=request.version.name,
            samples=samples,
            tokens=len(prompt) // _TOKEN_BYTES + samples * longest,
            beginnings=tuple(_beginnings(request.version.name, prompt)) if beginnings else (),
        )


def _beginnings(version: str, prompt: bytes) -> Iterator[int]:
    """Yield a hash of each prefix of the prompt, block by block. It includes the version, as keys
    and values depend on it."""
    number, size = hash(version), _BLOCK * _TOKEN_BYTES
    for end in range(size, len(prompt) + 1, size):
        number = hash((number, prompt[end - size : end]))
        yield number


@dataclass
class Load:
    requests: int = 0
    samples: int = 0
    tokens: int = 0
    versions: Counter[str] = field(default_factory=Counter)

    def count_work(self, work: Work, sign: int = 1) -> None:
        self.requests += sign
        self.samples += sign * work.samples
        self.tokens += sign * work.tokens
        self.versions[work.version] += sign


Engine = TypeVar("Engine", bound=Candidate)


class Balancer(Generic[Engine]):
    """`engines` returns the engines that may get work. `refusal` returns the error of work that no
    engine will take. `most_samples` 0 means unlimited room."""

    def __init__(
        self,
        engines: Callable[[Work], Sequence[Engine]],
        refusal: Callable[[Work], TandemError | None] = lambda _work: None,
    ) -> None:
        self.most_samples = 0
        self._engines = engines
        self._refusal = refusal
        self._loads: dict[Engine, Load] = {}
        self._awaited: dict[Engine, asyncio.Event] = {}
        self._numbers = count()
        self._waiting: dict[tuple[str, bool], deque[tuple[int, Work, asyncio.Future[Engine]]]] = {}
        """Samples and loads by version, with arrival numbers, so that a full engine's requests do
        not block the others."""
        self._blocks: OrderedDict[int, set[str]] = OrderedDict()
        """By prefix, the processes that computed it, least recently used first."""

    def load_of(self, engine: Engine) -> Load:
        return self._loads.get(engine, Load())

    async def assign(self, work: Work) -> Engine:
        """Wait for an engine with room and return it. The work counts there until `end`. Raises the
        error given to `fail`, or the refusal of all engines."""
        turn: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault((work.version, work.loads), deque())
        queue.append((next(self._numbers), work, turn))
        self.assign_waiting()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.end(turn.result(), work)
            raise

    def give(self, engine: Engine, work: Work) -> bool:
        """Assign the work to this engine. Return False if it may not get it or is full."""
        if engine not in self._engines(work) or not self._has_room(engine, work):
            return False
        self._loads.setdefault(engine, Load()).count_work(work)
        self._note(work, engine)
        return True

    def end(self, engine: Engine, work: Work) -> None:
        load = self._loads[engine]
        load.count_work(work, -1)
        if not load.requests:
            del self._loads[engine]
            if idle := self._awaited.pop(engine, None):
                idle.set()
        self.assign_waiting()

    async def until_idle(self, engine: Engine) -> None:
        if engine in self._loads:
            await self._awaited.setdefault(engine, asyncio.Event()).wait()

    @contextmanager
    def under_way(self, engine: Engine, work: Work) -> Iterator[None]:
        """Count the work at this engine during the block, regardless of room."""
        self._loads.setdefault(engine, Load()).count_work(work)
        try:
            yield
        finally:
            self.end(engine, work)

    def assign_waiting(self) -> None:
        firsts = [(queue[0][0], name) for name, queue in self._waiting.items()]
        heapify(firsts)
        while firsts:  # earliest first, of all versions that may have room
            _, name = heappop(firsts)
            queue = self._waiting[name]
            _, work, turn = queue[0]
            if not turn.done():  # skip cancelled ones
                engine = self._choose(work)
                if engine is not None:
                    self._loads.setdefault(engine, Load()).count_work(work)
                    turn.set_result(engine)
                elif error := self._refusal(work):
                    turn.set_exception(error)
                else:
                    continue
            queue.popleft()
            if queue:
                heappush(firsts, (queue[0][0], name))
            else:
                del self._waiting[name]

    def fail(self, error: TandemError) -> None:
        waiting, self._waiting = self._waiting, {}
        for queue in waiting.values():
            for _number, _work, turn in queue:
                if not turn.done():
                    turn.set_exception(error)

    # --- The choice ---------------------------------------------------------------------------

    def _choose(self, work: Work) -> Engine | None:
        serving = self._engines(work)
        having = [engine for engine in serving if self._has(engine, work.version)]
        chosen = self._best(work, having or serving)
        if having and (chosen is None or self._much_busier(chosen, 0, work)):
            idle = (engine for engine in serving if engine not in self._loads)
            chosen = next(idle, chosen)
        if chosen is not None and len(serving) > 1:
            self._note(work, chosen)
        return chosen

    def _best(self, work: Work, engines: Sequence[Engine]) -> Engine | None:
        free = [engine for engine in engines if self._has_room(engine, work)]
        if len(free) < 2:
            return free[0] if free else None
        least = min(free, key=self._tokens)
        nearest = self._nearest(work, free)
        if nearest is None or self._much_busier(nearest, self._tokens(least), work):
            return least
        return nearest

    def _nearest(self, work: Work, engines: Sequence[Engine]) -> Engine | None:
        for beginning in reversed(work.beginnings):
            has = self._blocks.get(beginning, ())
            if found := [engine for engine in engines if engine.process in has]:
                return min(found, key=self._tokens)
        return None

    def _much_busier(self, engine: Engine, tokens: int, work: Work) -> bool:
        """Return whether an engine has much more to do than `tokens`. `_GROUP` counts single
        samples."""
        single = work.tokens / max(1, work.samples)
        return self._tokens(engine) > 2 * tokens + _GROUP * single

    def _tokens(self, engine: Engine) -> int:
        return self.load_of(engine).tokens

    def _has(self, engine: Engine, version: str) -> bool:
        """Return whether the engine has the version or will load it for work in progress."""
        return version in engine.loaded or self.load_of(engine).versions[version] > 0

    def _has_room(self, engine: Engine, work: Work) -> bool:
        most = self.most_samples
        return work.in_flight or not most or self.load_of(engine).samples < most

    def _note(self, work: Work, engine: Engine) -> None:
        for beginning in work.beginnings:
            self._blocks.setdefault(beginning, set()).add(engine.process)
            self._blocks.move_to_end(beginning)
        while len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)
