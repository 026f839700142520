"""The balancer: which of a sampler's engines a request goes to, and when.

It knows what is under way at each engine, in samples and in tokens, and which beginnings of prompts
each has computed, in blocks as the engines' prefix caches have them. Of the engines that have room:

1. Those that have the request's version, or change to it for an earlier request, come before
   others. An engine that would have to load it first gets the request if no other has it; or if it
   has nothing to do, and those that have it are much busier.
2. Of these, the one that has the longest beginning of the prompt: the samples of one prompt, and
   the turns of one conversation, go where their keys and values are. Not if it is much busier than
   the least busy one.
3. Else the one with the fewest tokens to compute.

Much busier means: more than twice as busy, and by `_GROUP` such requests. An engine has room for
`most_samples` at once; requests beyond that wait here, in the order in which they came, of whatever
version, so that an engine that starts later, or is faster, gets its part of them. All this changes
when an answer comes, never what it is: a sample is a function of its request and of the weights
that it names.
"""

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
"""Tokens of a block of a prompt: what engines on a CPU have, and two of those on a GPU."""
_MOST_BLOCKS = 32_768
"""Blocks that are remembered: a million tokens."""
_UNBOUNDED = 512
"""Tokens that a sample without a limit is taken to have."""
_GROUP = 16
_TOKEN_BYTES = 4


class Candidate(Protocol):
    """An engine that serves. `process` names the process that it is now."""

    @property
    def process(self) -> str: ...

    @property
    def loaded(self) -> set[str]:
        """The full weights and the adapters that it has answered with last."""
        ...


@dataclass(frozen=True)
class Work:
    """What a request asks of an engine: so many `samples` of `tokens` in all, its prompt included,
    by the weights of a `version`. `beginnings` has a number for each beginning of its prompt, one
    block longer each."""

    version: str
    samples: int = 0
    tokens: int = 0
    beginnings: tuple[int, ...] = ()

    @classmethod
    def of(cls, request: sampler_pb2.SampleRequest, *, beginnings: bool) -> Work:
        """Without `beginnings`, there is no choice for which they would count."""
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
    """Yield a number for the prompt's first block, its first two blocks and so on. Each version
    has keys and values of its own."""
    number, size = hash(version), _BLOCK * _TOKEN_BYTES
    for end in range(size, len(prompt) + 1, size):
        number = hash((number, prompt[end - size : end]))
        yield number


@dataclass
class Load:
    """What is under way at an engine."""

    requests: int = 0
    samples: int = 0
    tokens: int = 0
    versions: Counter[str] = field(default_factory=Counter)

    def add(self, work: Work, sign: int = 1) -> None:
        self.requests += sign
        self.samples += sign * work.samples
        self.tokens += sign * work.tokens
        self.versions[work.version] += sign


Engine = TypeVar("Engine", bound=Candidate)


class Balancer(Generic[Engine]):
    """`engines` returns those that serve now. With `most_samples` 0, an engine always has room."""

    def __init__(self, engines: Callable[[], Sequence[Engine]]) -> None:
        self.most_samples = 0
        self._engines = engines
        self._loads: dict[Engine, Load] = {}
        self._awaited: dict[Engine, asyncio.Event] = {}
        self._numbers = count()
        self._waiting: dict[str, deque[tuple[int, Work, asyncio.Future[Engine]]]] = {}
        """By the version that they need, with their numbers in the order in which they came: one
        that has no room keeps no other from its engine."""
        self._blocks: OrderedDict[int, set[str]] = OrderedDict()
        """By beginning of a prompt, the processes that have computed it; the last used is last."""

    def load_of(self, engine: Engine) -> Load:
        return self._loads.get(engine, Load())

    async def assign(self, work: Work) -> Engine:
        """Return the engine that is to do this, once there is one with room. It counts as under way
        there until `end`. Raises what `fail` is called with."""
        turn: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(work.version, deque()).append((next(self._numbers), work, turn))
        self.assign_waiting()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.end(turn.result(), work)
            raise

    def give(self, engine: Engine, work: Work) -> bool:
        """Assign this to an engine, whatever the others do; False if it serves no more, or has no
        room."""
        if engine not in self._engines() or not self._has_room(engine):
            return False
        self._loads.setdefault(engine, Load()).add(work)
        self._note(work, engine)
        return True

    def end(self, engine: Engine, work: Work) -> None:
        """Note that the engine has nothing to do with it any more."""
        load = self._loads[engine]
        load.add(work, -1)
        if not load.requests:
            del self._loads[engine]
            if idle := self._awaited.pop(engine, None):
                idle.set()
        self.assign_waiting()

    async def until_idle(self, engine: Engine) -> None:
        """Return when nothing is under way at an engine."""
        if engine in self._loads:
            await self._awaited.setdefault(engine, asyncio.Event()).wait()

    @contextmanager
    def under_way(self, engine: Engine, work: Work) -> Iterator[None]:
        """Count something that goes to this engine, whatever else it does, while the block runs."""
        self._loads.setdefault(engine, Load()).add(work)
        try:
            yield
        finally:
            self.end(engine, work)

    def assign_waiting(self) -> None:
        """Assign what waits, as far as there is room: something has ended, or an engine serves."""
        firsts = [(queue[0][0], version) for version, queue in self._waiting.items()]
        heapify(firsts)
        while firsts:  # the one that came first, of all versions that may have room
            _, version = heappop(firsts)
            queue = self._waiting[version]
            _, work, turn = queue[0]
            if not turn.done():  # else it was cancelled
                engine = self._choose(work)
                if engine is None:
                    continue
                self._loads.setdefault(engine, Load()).add(work)
                turn.set_result(engine)
            queue.popleft()
            if queue:
                heappush(firsts, (queue[0][0], version))
            else:
                del self._waiting[version]

    def fail(self, error: TandemError) -> None:
        """End what waits: no engine will serve it."""
        waiting, self._waiting = self._waiting, {}
        for queue in waiting.values():
            for _number, _work, turn in queue:
                if not turn.done():
                    turn.set_exception(error)

    # --- The choice ---------------------------------------------------------------------------

    def _choose(self, work: Work) -> Engine | None:
        serving = self._engines()
        having = [engine for engine in serving if self._has(engine, work.version)]
        chosen = self._best(work, having or serving)
        if having and (chosen is None or self._much_busier(chosen, 0, work)):
            idle = (engine for engine in serving if engine not in self._loads)
            chosen = next(idle, chosen)
        if chosen is not None and len(serving) > 1:
            self._note(work, chosen)
        return chosen

    def _best(self, work: Work, engines: Sequence[Engine]) -> Engine | None:
        """Return the best of those that have room; None if none has."""
        free = [engine for engine in engines if self._has_room(engine)]
        if len(free) < 2:
            return free[0] if free else None
        least = min(free, key=self._tokens)
        nearest = self._nearest(work, free)
        if nearest is None or self._much_busier(nearest, self._tokens(least), work):
            return least
        return nearest

    def _nearest(self, work: Work, engines: Sequence[Engine]) -> Engine | None:
        """Return the least busy of the engines that have the longest beginning of the prompt, if
        any of them has one."""
        for beginning in reversed(work.beginnings):
            has = self._blocks.get(beginning, ())
            if found := [engine for engine in engines if engine.process in has]:
                return min(found, key=self._tokens)
        return None

    def _much_busier(self, engine: Engine, tokens: int, work: Work) -> bool:
        """Whether an engine has much more to do than so many tokens. `_GROUP` is counted in single
        samples of the request."""
        single = work.tokens / max(1, work.samples)
        return self._tokens(engine) > 2 * tokens + _GROUP * single

    def _tokens(self, engine: Engine) -> int:
        return self.load_of(engine).tokens

    def _has(self, engine: Engine, version: str) -> bool:
        """Whether it has a version, or is to load it for what is under way there."""
        return version in engine.loaded or self.load_of(engine).versions[version] > 0

    def _has_room(self, engine: Engine) -> bool:
        return not self.most_samples or self.load_of(engine).samples < self.most_samples

    def _note(self, work: Work, engine: Engine) -> None:
        for beginning in work.beginnings:
            self._blocks.setdefault(beginning, set()).add(engine.process)
            self._blocks.move_to_end(beginning)
        while len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)
