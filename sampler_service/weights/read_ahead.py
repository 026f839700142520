"""Reads and verifies the next weights or adapter while the engine samples.

The data stays in the system's page cache, which all processes of an engine share. If a version
exceeds the free memory, the load reads a part again. A thread that hangs on a volume is abandoned
after the time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass, field

from sampler_service.weights.loader import LoadableVersion, Verified
from tandem.errors import LoadFailed, describe
from tandem.telemetry import get_log

Verify = Callable[[LoadableVersion, Callable[[], None]], Verified]
"""Reads a version. The given function is called before each piece, and may raise to end it."""


class _Unwanted(Exception):
    """Ends an abandoned reading."""


@dataclass(eq=False)
class _Reading:
    version: LoadableVersion
    began: float
    result: Future[Verified] = field(default_factory=Future)
    unwanted: threading.Event = field(default_factory=threading.Event)

    def go_on(self) -> None:
        if self.unwanted.is_set():
            raise _Unwanted


class ReadAhead:
    """Reads one version at a time, and keeps its outcome until another is wanted.

    Use in the engine's thread: `want(version)`. Once `outcome(version)` is a `Verified`, call
    `take_version(version)`."""

    def __init__(
        self,
        verify: Verify,
        *,
        timeout: float,
        clock: Callable[[], float],
        on_done: Callable[[], None],
        start: Callable[[Callable[[], None]], None],
    ) -> None:
        """`timeout` limits a reading, in seconds of `clock`.

        `on_done` is called in the reader's thread. `start` begins a reading."""
        self._verify = verify
        self._timeout = timeout
        self._clock = clock
        self._on_done = on_done
        self._start = start
        self._reading: _Reading | None = None

    def want(self, version: LoadableVersion | None) -> None:
        """Read a version, unless that was done. Any other reading is abandoned."""
        reading = self._reading
        if reading is not None and reading.version != version:
            reading.unwanted.set()
            reading = self._reading = None
        if reading is None and version is not None:
            reading = self._reading = _Reading(version, self._clock())
            self._start(lambda: self._read(reading))

    @property
    def wanted(self) -> LoadableVersion | None:
        """The version that is being read, or was read and not taken."""
        return None if self._reading is None else self._reading.version

    def outcome(self, version: LoadableVersion) -> Verified | LoadFailed | None:
        """Return the outcome of a reading. None if it is unfinished or was not wanted."""
        reading = self._reading
        if reading is None or reading.version != version:
            return None
        # It may end before the next line. Then `seconds_left` is None, not 0.
        if not reading.result.done():
            return self._late(version) if self.seconds_left == 0.0 else None
        try:
            return reading.result.result()
        except LoadFailed as error:
            return error

    def has_verified(self, version: LoadableVersion) -> bool:
        """Return whether a version was read and verified."""
        return isinstance(self.outcome(version), Verified)

    def take_version(self, version: LoadableVersion) -> Verified:
        """Wait for a version, return it, and forget it. Raises `LoadFailed`."""
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

    def _late(self, version: LoadableVersion) -> LoadFailed:
        return LoadFailed(f"{version.name} was not read within {self._timeout:g} s")


def in_thread(function: Callable[[], None]) -> None:
    threading.Thread(target=function, name="read ahead", daemon=True).start()
