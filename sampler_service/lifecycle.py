"""The loaded weights of an engine, and its loads, sleeps and wakes.

The scheduler uses it in the engine's thread, while the engine is idle or paused. An engine serves
only verified weights. If it can load neither the wanted nor the previous version, its state is
`failed`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from sampler_service.engine import Engine, EngineMemory, EngineState, SleepLevel, WeightsTouched
from sampler_service.weights.adapters import AdapterCache
from sampler_service.weights.loader import LoadableVersion, Loader, LoadOutcome, Verified
from sampler_service.weights.read_ahead import ReadAhead
from tandem.errors import LoadFailed
from tandem.telemetry import get_log

SwitchPhase = Literal["drain", "sleep", "wake_weights", "read", "load", "wake_cache", "check"]


class NothingToServe(LoadFailed):
    """Neither the wanted nor the previous version could be loaded."""

    type = LoadFailed.type


@dataclass(frozen=True)
class SwitchReport:
    """A completed sleep or wake. `phases` are in seconds, empty without an effect."""

    before: EngineMemory
    after: EngineMemory
    phases: dict[SwitchPhase, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The duration, without the wait for running requests."""
        return sum(seconds for phase, seconds in self.phases.items() if phase != "drain")

    @property
    def bytes_moved(self) -> int:
        """The change of device memory, in bytes."""
        return abs(self.after.device - self.before.device) if self.phases else 0


@dataclass(frozen=True)
class Woken:
    """A successful wake, and its load, if any.

    After a `failure` to load the wanted version, the previous one serves."""

    switch: SwitchReport
    loaded: LoadOutcome | None = None
    failure: LoadFailed | None = None


class EngineLifecycle:
    def __init__(
        self,
        engine: Engine,
        loader: Loader,
        reader: ReadAhead,
        adapters: AdapterCache,
        *,
        base: LoadableVersion,
        on_state: Callable[[EngineState], None],
    ) -> None:
        """The engine was started with `base`. `on_state` receives each new state."""
        self._engine = engine
        self._loader = loader
        self._reader = reader
        self._adapters = adapters
        self._on_state = on_state
        self._log = get_log()
        self._placed = Verified(base)
        self._intact = True
        self._cache_awake = True
        self.state = EngineState.AWAKE
        on_state(self.state)

    @property
    def loaded(self) -> LoadableVersion:
        """The serving version, or that before the sleep."""
        return self._placed.version

    def load(self, version: LoadableVersion) -> LoadOutcome:
        """Replace the serving version.

        Raises `LoadFailed` if the previous version serves again, else `NothingToServe`."""
        self._move_to(EngineState.LOADING)
        try:
            outcome = self._serve(version, {})
        except LoadFailed as error:
            if not self._intact:
                self._serve_previous(error, {})
            self._move_to(EngineState.AWAKE)
            raise
        self._move_to(EngineState.AWAKE)
        assert outcome is not None, "it was loaded already"
        return outcome

    def sleep(self, level: SleepLevel, *, drained: float) -> SwitchReport:
        """Put the engine to sleep. `drained` is the wait for running requests, in seconds."""
        phases: dict[SwitchPhase, float] = {"drain": drained}
        before = self._engine.memory()
        self._cache_awake = False
        if level is SleepLevel.DROP_WEIGHTS:
            self._forget_weights()
        with _timed(phases, "sleep"):
            self._engine.sleep(level)
        self._move_to(EngineState.ASLEEP)
        return SwitchReport(before=before, after=self._engine.memory(), phases=phases)

    def wake(self, version: LoadableVersion) -> Woken:
        """Wake the engine to serve this version, or else the previous one.

        Raises `NothingToServe` if both fail."""
        self._move_to(EngineState.WAKING)
        phases: dict[SwitchPhase, float] = {}
        before = self._engine.memory()
        with _timed(phases, "wake_weights"):
            self._engine.wake_weights()
        failure = None
        try:
            loaded = self._serve(version, phases)
        except LoadFailed as error:
            loaded = self._serve_previous(error, phases)
            failure = error if version != self.loaded else None
        self._move_to(EngineState.AWAKE)
        switch = SwitchReport(before=before, after=self._engine.memory(), phases=phases)
        return Woken(switch, loaded=loaded, failure=failure)

    def unchanged(self) -> SwitchReport:
        memory = self._engine.memory()
        return SwitchReport(before=memory, after=memory)

    def fail(self) -> None:
        if self.state is not EngineState.FAILED:
            self._move_to(EngineState.FAILED)

    def _serve(
        self, version: LoadableVersion, phases: dict[SwitchPhase, float]
    ) -> LoadOutcome | None:
        """Load a version if needed, wake a sleeping KV cache, and check the engine's numbers.

        Returns the outcome of the load, if any."""
        started = time.monotonic()
        placed = self._placed
        needs_load = not self._intact or version != self.loaded
        try:
            if needs_load:
                with _timed(phases, "read"):  # immediate if already read
                    placed = self._reader.take_version(version)
                with _timed(phases, "load"):
                    self._loader.place(placed)
                self._forget_weights()  # until the check
            if not self._cache_awake:
                with _timed(phases, "wake_cache"):
                    self._engine.wake_cache()
                self._cache_awake = True
            with _timed(phases, "check"):
                difference = self._loader.confirm(placed)
        except WeightsTouched as error:
            self._forget_weights()
            if placed.version.handoff is None:
                raise
            self._log.warning("handoff_failed", version=version.name, error=error.message)
            outcome = self._serve(_of_files(placed).version, phases)
            assert outcome is not None, "it was not loaded"
            seconds = time.monotonic() - started
            return replace(outcome, seconds=seconds, handoff_failure=error.message)
        self._placed, self._intact = _of_files(placed), True
        if not needs_load:
            return None
        return LoadOutcome(
            # Named by its files: others continue with it when the handoff is gone.
            version=self.loaded,
            bytes=placed.bytes,
            seconds=time.monotonic() - started,
            canary_difference=difference,
            handed_off=placed.version.handoff is not None,
            handoff_failure=placed.handoff_failure,
        )

    def _serve_previous(
        self, cause: LoadFailed, phases: dict[SwitchPhase, float]
    ) -> LoadOutcome | None:
        """Serve the previous version again. Raises `NothingToServe` if it cannot be loaded."""
        try:
            outcome = self._serve(self.loaded, phases)
        except LoadFailed as error:
            self._move_to(EngineState.FAILED)
            self._log.error("restore_failed", version=self.loaded.name, error=error.message)
            raise NothingToServe(
                f"{cause.message}; {self.loaded.name}, which served before, could not be loaded "
                f"again: {error.message}"
            ) from error
        self._log.info("restored", version=self.loaded.name)
        return outcome

    def _forget_weights(self) -> None:
        self._intact = False
        self._adapters.clear()

    def _move_to(self, state: EngineState) -> None:
        self.state = state
        self._on_state(state)


def _of_files(placed: Verified) -> Verified:
    """Return the version without its handoff, which can be read once."""
    return replace(placed, version=replace(placed.version, handoff=None))


@contextmanager
def _timed(phases: dict[SwitchPhase, float], phase: SwitchPhase) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    finally:
        phases[phase] = phases.get(phase, 0.0) + time.monotonic() - started
