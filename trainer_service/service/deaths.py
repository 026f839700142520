"""Finds the rank or node that broke a process group. Its death kills its peers within moments."""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import PurePath

from pydantic import BaseModel

from tandem.errors import OutOfMemory, TandemError, WorkerDied, describe, without_paths

_DEFECTS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError),
    *(NotImplementedError, RecursionError, TypeError, ValueError),
)
"""Errors of a program. Others may come from a device, a disk or a network."""
_MOST_CAUSES = 3
_MOST_FRAMES = 12
_MOST_CHARACTERS = 800


class RankReport(BaseModel):
    """`out_of_memory_at`: the tokens of a micro-batch that was too large, or 0. `defect`: as in
    `WorkerDied`."""

    error: str
    out_of_memory_at: int = 0
    defect: bool = False

    @classmethod
    def of_error(cls, error: BaseException) -> RankReport:
        from trainer_service.batches.memory import MicroBatchTooLarge  # imports torch

        if isinstance(error, MicroBatchTooLarge):
            return cls(error=str(error), out_of_memory_at=error.tokens)
        own = isinstance(error, _DEFECTS) and not isinstance(error, TandemError)
        return cls(error=trace(error), defect=own)


def trace(error: BaseException) -> str:
    """Return an error of any library on one line: type, sentence and traceback, and its causes'.

    Example: `KeyError: 'weights' (traceback: loop.py:88 compute, losses.py:12 weigh)`."""
    told: list[str] = []
    at: BaseException | None = error
    while at is not None and len(told) < _MOST_CAUSES:
        text = str(at).strip().splitlines()
        sentence = f"{type(at).__name__}: {text[0]}" if text else type(at).__name__
        if isinstance(at, TandemError):
            told.append(describe(at, typed=True))
            break
        frames = traceback.extract_tb(at.__traceback__)[-_MOST_FRAMES:]
        places = ", ".join(f"{PurePath(f.filename).name}:{f.lineno} {f.name}" for f in frames)
        sentence = without_paths(sentence)[:_MOST_CHARACTERS]
        told.append(f"{sentence} (traceback: {places})" if places else sentence)
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    line = " ".join(", caused by ".join(told).splitlines())
    return line.encode("utf-8", "backslashreplace").decode()  # it may hold half a surrogate


class Death(BaseModel):
    """The end of a rank, with its `report`, if it could write one. `node`: the end of a whole node,
    in a sentence."""

    rank: int = 0
    returncode: int = 0
    report: RankReport | None = None
    node: str = ""

    def cause(self, where: str) -> TandemError:
        """Return the error. `where` follows the rank's number."""
        rank = f"rank {self.rank}{where}"
        if self.node:
            return WorkerDied(self.node)
        if self.returncode < 0:
            return WorkerDied(f"{rank} was killed by {signal.Signals(-self.returncode).name}")
        if self.report is None:
            return WorkerDied(f"{rank} ended with exit code {self.returncode}")
        sentence = f"{rank} failed: {self.report.error}"
        if tokens := self.report.out_of_memory_at:
            return OutOfMemory(sentence, tokens=tokens)
        return WorkerDied(sentence, defect=self.report.defect)

    @property
    def likeliness(self) -> int:
        if self.node:
            return 3
        if self.returncode < 0:
            return 2
        return int(self.report is not None and self.report.out_of_memory_at > 0)


class Deaths:
    """The deaths of one trainer's ranks.

    `on_first` is called once, from a thread, with the error of the causing rank. `where` returns a
    rank's node as text."""

    def __init__(
        self,
        *,
        on_first: Callable[[TandemError], None],
        settle: float,
        where: Callable[[int], str],
    ) -> None:
        """`settle`: seconds within which deaths with the same cause become known."""
        self._on_first = on_first
        self._where = where
        self._settle = settle
        self._deaths: list[Death] = []
        self._changed = threading.Condition()

    def add_death(self, death: Death) -> None:
        with self._changed:
            first = not self._deaths
            self._deaths.append(death)
            self._changed.notify_all()
        if first:  # in a thread: the caller may be about to report the next death
            threading.Thread(target=self._tell, name="deaths", daemon=True).start()

    def cause(self, *, timeout: float) -> TandemError | None:
        """Return why the process group broke, or None if nothing dies within `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._deaths), timeout):
                return None
        return self._cause()

    def _tell(self) -> None:
        self._on_first(self._cause())

    def _cause(self) -> TandemError:
        """The cause: a lost node, else a rank killed by a signal, else one out of memory, else the
        first."""
        time.sleep(self._settle)
        with self._changed:
            worst = max(self._deaths, key=lambda death: death.likeliness)
        return worst.cause(self._where(worst.rank))
