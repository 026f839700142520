"""Rewards in processes of their own, with a limit on their time and a policy for failures."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, TypeAlias

from tandem.rl.config import RewardFailure
from tandem.rl.rollouts import Example

Reward: TypeAlias = Callable[[Example, str], float] | Callable[[Example, str], Awaitable[float]]
"""Scores an answer. A function of a module or script, sync or async."""

Reason = Literal["timeout", "exception", "crash"]

START_TIMEOUT = 120.0
"""Seconds for a process to start, which imports the user's script and its packages."""


class RewardFailed(RuntimeError):
    """A reward failed, and its failures end the loop. `reason` is "timeout", "exception", "crash"
    or "start"."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class Scorer(Protocol):
    """What a loop needs of a reward: a number for an answer, or None for a dropped one.
    `last_failure` is a sentence about the newest failure."""

    last_failure: str

    async def score(self, example: Example, answer: str) -> float | None: ...


class RewardPool:
    """Scores answers: a sync reward in `processes` processes, an async one in the event loop.

    After `timeout` seconds of work, a process is killed and replaced. A process that dies costs the
    answer it was scoring, and no other. `failure` says what becomes of a failed answer: "drop"
    (None), "zero" (0.0) or "error" (`RewardFailed`). `failures` counts them by reason, and
    `last_failure` is a sentence about the newest. A result that is no finite number is an
    exception.

    An async reward must not block the event loop. Raises `ValueError` for a reward that another
    process cannot import, such as a lambda."""

    def __init__(
        self,
        reward: Reward,
        *,
        processes: int = 2,
        timeout: float = 60.0,
        failure: RewardFailure = "drop",
    ) -> None:
        self.failures: Counter[str] = Counter()
        self.last_failure = ""
        self._reward = reward
        self._timeout = timeout
        self._failure = failure
        self._in_loop = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(
            type(reward).__call__
        )
        self._workers: list[_RewardWorker] = []
        if not self._in_loop:
            payload = _importable(reward)
            self._workers = [_RewardWorker(payload) for _ in range(max(processes, 1))]
        self._free: asyncio.LifoQueue[_RewardWorker] = asyncio.LifoQueue()
        self._starts: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> RewardPool:
        self._start(*self._workers)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed = True
        for task in self._starts:
            task.cancel()
        await asyncio.gather(*self._starts, return_exceptions=True)
        for worker in self._workers:
            worker.kill()

    async def score(self, example: Example, answer: str) -> float | None:
        """Return the reward, or what the policy puts in the place of a failed one."""
        if self._in_loop:
            outcome = await self._score_in_loop(example, answer)
        else:
            outcome = await self._score_in_process(example, answer)
        if isinstance(outcome, float):
            return outcome
        reason, sentence = outcome
        self.failures[reason] += 1
        self.last_failure = sentence
        if self._failure == "error":
            raise RewardFailed(reason, sentence)
        return 0.0 if self._failure == "zero" else None

    async def _score_in_loop(self, example: Example, answer: str) -> _Outcome:
        try:
            async with asyncio.timeout(self._timeout) as limit:
                return _number(await self._reward(example, answer))  # type: ignore[misc]
        except TimeoutError as error:
            return self._late() if limit.expired() else _raised(error)
        except Exception as error:  # noqa: BLE001 - a user's code raises anything
            return _raised(error)

    async def _score_in_process(self, example: Example, answer: str) -> _Outcome:
        worker = await self._free.get()
        usable = False
        try:
            if self._closed:
                raise RuntimeError("the pool of the reward is closed")
            if not worker.alive:
                await worker.start()
            async with asyncio.timeout(self._timeout):
                outcome = await worker.score(example, answer)
            usable = True
            return outcome
        except TimeoutError:
            return self._late()
        except BrokenExecutor:
            return "crash", "The reward's process died while it scored an answer"
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            usable = True  # the example never left this process
            return _raised(error)
        finally:
            if not usable:
                worker.kill()
            if usable or self._closed:
                self._free.put_nowait(worker)
            else:
                self._start(worker)

    def _late(self) -> _Outcome:
        return "timeout", f"The reward took longer than {self._timeout:g} s (reward_timeout)"

    def _start(self, *workers: _RewardWorker) -> None:
        """Start workers in the background, in turn: the imports of all at once would delay the
        loop's own. After a failure, the worker's next score tries again, and says why."""

        async def start() -> None:
            for worker in workers:
                try:
                    with contextlib.suppress(RewardFailed):
                        await worker.start()
                finally:
                    self._free.put_nowait(worker)

        task = asyncio.create_task(start())
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)


_Outcome: TypeAlias = float | tuple[Reason, str]
"""A reward, or the reason of a failure and a sentence about it."""


class _RewardWorker:
    """One process. An executor of its own ties each crash to one answer."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._executor: ProcessPoolExecutor | None = None
        self._process: int | None = None

    @property
    def alive(self) -> bool:
        """Whether it has started, and did not die since its last answer."""
        processes = (self._executor and self._executor._processes) or {}
        return self._process is not None and any(
            process.is_alive() for process in list(processes.values())
        )

    async def start(self) -> None:
        """Raises `RewardFailed` if the process does not start."""
        self.kill()
        context = multiprocessing.get_context("spawn")
        executor = ProcessPoolExecutor(
            1, mp_context=context, initializer=_prepare, initargs=(self._payload,)
        )
        self._executor = executor
        try:
            # The first task creates the process, which may block for some milliseconds.
            future = await asyncio.to_thread(executor.submit, os.getpid)
            async with asyncio.timeout(START_TIMEOUT):
                self._process = await asyncio.wrap_future(future)
        except TimeoutError:
            self._discard()
            raise RewardFailed(
                "start", f"The reward's process did not start within {START_TIMEOUT:g} s"
            ) from None
        except BrokenExecutor:
            self._discard()
            raise RewardFailed(
                "start",
                "The reward's process died at its start, and its error is above. Another process "
                "must be able to import the reward's module and the script",
            ) from None

    async def score(self, example: Example, answer: str) -> _Outcome:
        assert self._executor is not None
        future = self._executor.submit(_score, example, answer)
        return await asyncio.wrap_future(future)

    def kill(self) -> None:
        """Kill the process, and all processes that it started in its group."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process, signal.SIGKILL)
        self._process = None
        self._discard()

    def _discard(self) -> None:
        executor, self._executor = self._executor, None
        if executor is None:
            return
        # A process that hangs in an import has not told its id. Python 3.14 has `kill_workers`.
        # `shutdown` waits for one that a thread starts just now, and forgets the processes.
        processes = executor._processes  # empty until then, so no copy
        executor.shutdown(wait=False, cancel_futures=True)
        for process in list((processes or {}).values()):
            process.kill()


def _number(value: object) -> _Outcome:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return "exception", f"The reward returned {value!r:.80}, which is no number"
    number = float(value)
    if not math.isfinite(number):
        return "exception", f"The reward returned {number}, which is no finite number"
    return number


def _raised(error: BaseException) -> _Outcome:
    return "exception", f"The reward raised {type(error).__name__}: {error!s:.500}"


def _importable(reward: Reward) -> bytes:
    """Return the pickled name of a reward. Raises `ValueError` if a process cannot import it."""
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    if getattr(reward, "__module__", None) == "__main__" and script is None:
        raise ValueError(
            "the reward is defined in a notebook or an interactive session, where its processes "
            "cannot import it. Put it into a module, or make it an async function"
        )
    spec = getattr(main, "__spec__", None)  # of `python -m`
    imported = spec is None or not spec.name.endswith(".__main__")
    if script is not None and imported and not _guarded(script):
        raise ValueError(
            f"{Path(script).name} starts its loop when it is imported, and the reward's processes "
            'import it. Put the script\'s last part under `if __name__ == "__main__":`'
        )
    try:
        return pickle.dumps(reward)
    except (pickle.PicklingError, AttributeError, TypeError):
        name = getattr(reward, "__qualname__", repr(reward))
        raise ValueError(
            f"the reward {name} cannot be imported by another process, because it is a lambda, is "
            "defined inside a function, or holds open things. Define it at the top of a module or "
            "script, or make it an async function"
        ) from None


def _guarded(script: str) -> bool:
    """Whether a script has a part for its own run alone. An unreadable one counts as guarded."""
    try:
        body = ast.parse(Path(script).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return True
    return any(isinstance(node, ast.If) and "__name__" in ast.dump(node.test) for node in body)


# In the process of a worker.

_loaded: list[Callable[[Example, str], float]] = []


def _prepare(payload: bytes) -> None:
    """Load the reward. The process leads a group, for its end with all that it started."""
    os.setpgrp()
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()
    _loaded[:] = [pickle.loads(payload)]


def _end_after(sentinel: int) -> None:
    """A killed loop cannot end its processes, so each waits for the end of its parent."""
    connection.wait([sentinel])
    os.killpg(0, signal.SIGKILL)


def _score(example: Example, answer: str) -> _Outcome:
    try:
        return _number(_loaded[0](example, answer))
    except BaseException as error:  # noqa: BLE001 - also of sys.exit()
        return _raised(error)
