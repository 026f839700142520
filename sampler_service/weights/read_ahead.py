"""Reads and verifies the weights or the adapter wanted next, while the engine samples from others.

A thread reads all files of a version, which needs no engine. What it has read lies in the system's
page cache: it belongs to no process, the system takes it back when something else needs the memory,
and all processes of an engine share it. Of a version that is larger than the free memory, the load
reads a part again; it is slower then, and nothing else.

A thread that hangs on a volume cannot be ended. It is given up when its time is over, and what it
does later changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass, field

from sampler_service.weights.loader import Verified, WeightVersion
from tandem.errors import LoadFailed, describe
from tandem.telemetry import get_log

Verify = Callable[[WeightVersion, Callable[[], None]], Verified]
"""Reads a version, and calls the function that it is given before each piece; what that raises ends
the reading."""


class _Unwanted(Exception):
    """Ends a reading that nobody waits for any more."""


@dataclass(eq=False)
class _Reading:
    version: WeightVersion
    began: float
    result: Future[Verified] = field(default_factory=Future)
    unwanted: threading.Event = field(default_factory=threading.Event)

    def go_on(self) -> None:
        if self.unwanted.is_set():
            raise _Unwanted


class ReadAhead:
    """Reads one version at a time, and remembers its outcome until another is wanted. Except for
    what it runs in a thread, it belongs to the engine's.

    Use: `want(version)`; once `outcome(version)` is a `Verified`, `take(version)`.
    """

    def __init__(
        self,
        verify: Verify,
        *,
        timeout: float,
        clock: Callable[[], float],
        on_done: Callable[[], None],
        start: Callable[[Callable[[], None]], None],
    ) -> None:
        """A reading may take `timeout` seconds of the `clock`. `on_done` is called at the end of
        each, in its thread; `start` begins one."""
        self._verify = verify
        self._timeout = timeout
        self._clock = clock
        self._on_done = on_done
        self._start = start
        self._reading: _Reading | None = None

    def want(self, version: WeightVersion | None) -> None:
        """Have a version read, unless it is or was; give up and forget any other."""
        reading = self._reading
        if reading is not None and reading.version != version:
            reading.unwanted.set()
            reading = self._reading = None
        if reading is None and version is not None:
            reading = self._reading = _Reading(version, self._clock())
            self._start(lambda: self._read(reading))

    @property
    def wanted(self) -> WeightVersion | None:
        """What is being read, or was read last and not taken."""
        return None if self._reading is None else self._reading.version

    def outcome(self, version: WeightVersion) -> Verified | LoadFailed | None:
        """Return what came of reading a version, None while it goes on or if it was not wanted."""
        reading = self._reading
        if reading is None or reading.version != version:
            return None
        if not reading.result.done():  # it may be by the next line: then no time is left, not 0 s
            return self._late(version) if self.seconds_left == 0.0 else None
        try:
            return reading.result.result()
        except LoadFailed as error:
            return error

    def take(self, version: WeightVersion) -> Verified:
        """Return a version that was read, and forget it; wait until it is. Raises `LoadFailed`."""
        self.want(version)
        assert self._reading is not None
        try:
            return self._reading.result.result(timeout=self.seconds_left)
        except NotDone:
            raise self._late(version) from None
        finally:
            self.want(None)

    @property
    def seconds_left(self) -> float | None:
        """How long what is being read may still take; None if nothing is."""
        if self._reading is None or self._reading.result.done():
            return None
        return max(0.0, self._reading.began + self._timeout - self._clock())

    def _read(self, reading: _Reading) -> None:
        try:
            reading.result.set_result(self._verify(reading.version, reading.go_on))
        except _Unwanted:
            return
        except LoadFailed as error:
            reading.result.set_exception(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine was not touched
            name = reading.version.name
            get_log().exception("version_unreadable", version=name)
            reading.result.set_exception(
                LoadFailed(f"{name} cannot be read: {describe(error, typed=True)}")
            )
        self._on_done()

    def _late(self, version: WeightVersion) -> LoadFailed:
        return LoadFailed(f"{version.name} was not read within {self._timeout:g} s")


def in_thread(function: Callable[[], None]) -> None:
    """Run a function in a thread that does not keep the process from ending."""
    threading.Thread(target=function, name="read ahead", daemon=True).start()
