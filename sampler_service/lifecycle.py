"""What an engine holds, and whether it is awake: the version that it serves, and its moves.

An `EngineLifecycle` belongs to the engine's thread, and is used while the engine is idle or paused;
the scheduler decides when. Whatever fails, an engine serves a version whose files were verified, or
nothing: after weights were dropped or touched it must load one, and when neither the version wanted
nor the one before can be loaded, its state is `failed`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from sampler_service.engine import Engine, EngineMemory, EngineState, SleepLevel, WeightsTouched
from sampler_service.weights.adapters import AdapterCache
from sampler_service.weights.loader import Loader, LoadOutcome, Verified, WeightVersion
from sampler_service.weights.read_ahead import ReadAhead
from tandem.errors import LoadFailed
from tandem.telemetry import get_log

SwitchPhase = Literal["drain", "sleep", "wake_weights", "read", "load", "wake_cache", "check"]


class EngineLost(LoadFailed):
    """Neither the version wanted nor the one before could be loaded: nothing is served any more."""


@dataclass(frozen=True)
class Switch:
    """A sleep or a wake that was carried out. `phases` are seconds; without any, the engine already
    was as wanted."""

    before: EngineMemory
    after: EngineMemory
    phases: dict[SwitchPhase, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """What the switch cost, without the wait for what ran."""
        return sum(seconds for phase, seconds in self.phases.items() if phase != "drain")

    @property
    def bytes_moved(self) -> int:
        """By how much the use of the device has changed."""
        return abs(self.after.device - self.before.device) if self.phases else 0


@dataclass(frozen=True)
class Woken:
    """A wake that succeeded. `loaded` is the load that it took, if any; `failure` why the version
    that was wanted could not be loaded: then the version before serves."""

    switch: Switch
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
        base: WeightVersion,
        on_state: Callable[[EngineState], None],
    ) -> None:
        """`base` is the base model, which the engine was started with. `on_state` is called with
        each new state."""
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
    def loaded(self) -> WeightVersion:
        """The version that serves, or that served before the engine fell asleep."""
        return self._placed.version

    def load(self, version: WeightVersion) -> LoadOutcome:
        """Load a version in place of that which serves.

        Raises `LoadFailed`, after which the version before serves, or `EngineLost`.
        """
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

    def sleep(self, level: SleepLevel, *, drained: float) -> Switch:
        """Put the engine to sleep. `drained` are the seconds that what ran took to end."""
        phases: dict[SwitchPhase, float] = {"drain": drained}
        before = self._engine.memory()
        self._cache_awake = False
        if level is SleepLevel.DROP_WEIGHTS:
            self._forget_weights()
        with _timed(phases, "sleep"):
            self._engine.sleep(level)
        self._move_to(EngineState.ASLEEP)
        return Switch(before=before, after=self._engine.memory(), phases=phases)

    def wake(self, version: WeightVersion) -> Woken:
        """Wake the engine, to serve this version.

        If it cannot be loaded, the version before serves. Raises `EngineLost` if neither does.
        """
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
        switch = Switch(before=before, after=self._engine.memory(), phases=phases)
        return Woken(switch, loaded=loaded, failure=failure)

    def unchanged(self) -> Switch:
        """The answer to a sleep or a wake that there is nothing to do for."""
        memory = self._engine.memory()
        return Switch(before=memory, after=memory)

    def fail(self) -> None:
        """Note that the engine itself has failed."""
        if self.state is not EngineState.FAILED:
            self._move_to(EngineState.FAILED)

    def _serve(
        self, version: WeightVersion, phases: dict[SwitchPhase, float]
    ) -> LoadOutcome | None:
        """Load a version, unless its weights are in the engine, wake the KV cache if it is asleep,
        and check what the engine computes. Return the outcome of the load, None without one."""
        started = time.monotonic()
        placed = self._placed
        needs_load = not self._intact or version != self.loaded
        try:
            if needs_load:
                with _timed(phases, "read"):  # at once, if it was read before
                    placed = self._reader.take(version)
                with _timed(phases, "load"):
                    self._loader.place(placed)
                self._forget_weights()  # until they are checked
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
            version=self.loaded,  # by its files: others go on with it when nothing is kept any more
            bytes=placed.bytes,
            seconds=time.monotonic() - started,
            canary_difference=difference,
            handed_off=placed.version.handoff is not None,
            handoff_failure=placed.handoff_failure,
        )

    def _serve_previous(
        self, cause: LoadFailed, phases: dict[SwitchPhase, float]
    ) -> LoadOutcome | None:
        """Serve the version before. Raises `EngineLost` if it cannot be loaded again either."""
        try:
            outcome = self._serve(self.loaded, phases)
        except LoadFailed as error:
            self._move_to(EngineState.FAILED)
            self._log.error("restore_failed", version=self.loaded.name, error=error.message)
            raise EngineLost(
                f"{cause.message}; {self.loaded.name}, which served before, could not be loaded "
                f"again: {error.message}"
            ) from error
        self._log.info("restored", version=self.loaded.name)
        return outcome

    def _forget_weights(self) -> None:
        """Note that the engine must load weights before it serves, and holds no adapters."""
        self._intact = False
        self._adapters.clear()

    def _move_to(self, state: EngineState) -> None:
        self.state = self.state.move_to(state)
        self._on_state(state)


def _of_files(placed: Verified) -> Verified:
    """As the version is to be loaded from now on: what was handed over is there once."""
    return replace(placed, version=replace(placed.version, handoff=None))


@contextmanager
def _timed(phases: dict[SwitchPhase, float], phase: SwitchPhase) -> Iterator[None]:
    """Add the seconds of the block to a phase."""
    started = time.monotonic()
    try:
        yield
    finally:
        phases[phase] = phases.get(phase, 0.0) + time.monotonic() - started
