"""Which full weights are in the engine, and how they change to others."""

from __future__ import annotations

from sampler_service.adapters import Adapters
from sampler_service.engine import WeightsTouched
from sampler_service.metrics import SamplerMetrics
from sampler_service.reload import Loader, LoadOutcome, Version
from sampler_service.states import State, StateMachine
from tandem.errors import LoadFailed
from tandem.telemetry import get_log


class WeightsLost(LoadFailed):
    """Neither the new version nor the one before it could be loaded: nothing can serve."""

    type = LoadFailed.type


class Turnover:
    """Literal use, in the engine's thread and with an engine that has drained:
    `outcome = turnover.change_to(version)`."""

    def __init__(
        self, loader: Loader, adapters: Adapters, *, version: Version, metrics: SamplerMetrics
    ) -> None:
        """`version` is what the engine was started with."""
        self._loader = loader
        self._adapters = adapters
        self._metrics = metrics
        self._log = get_log()
        self._machine = StateMachine(on_change=metrics.state)
        self.version = version
        metrics.state(self._machine.state)
        metrics.version(version)

    @property
    def state(self) -> State:
        return self._machine.state

    def fail(self) -> None:
        """The engine is lost."""
        if self._machine.state is not State.FAILED:
            self._machine.move(State.FAILED)

    def change_to(self, target: Version) -> LoadOutcome:
        """Loads other weights; all adapters leave. Raises `LoadFailed` when those that served
        before go on serving, and `WeightsLost` when they cannot."""
        self._machine.move(State.LOADING)
        try:
            outcome = self._loader.load(target)
        except LoadFailed as error:
            self.note_failure(target, error)
            self._restore(error)
            raise LoadFailed(error.message) from error
        self._adapters.clear()
        self.version = target
        self._machine.move(State.AWAKE)
        self._metrics.loaded(outcome)
        self.note(outcome)
        return outcome

    def note(self, outcome: LoadOutcome) -> None:
        self._log.info(
            "loaded",
            version=outcome.version.name,
            seconds=round(outcome.seconds, 4),
            bytes=outcome.bytes,
            canary_difference=outcome.canary_difference,
        )

    def note_failure(self, version: Version, error: LoadFailed) -> None:
        self._metrics.load_failed()
        self._log.error("load_failed", version=version.name, error=error.message)

    def _restore(self, cause: LoadFailed) -> None:
        """Makes sure that the old version serves again."""
        if not isinstance(cause, WeightsTouched):
            self._machine.move(State.AWAKE)
            return
        self._adapters.clear()
        try:
            self._loader.load(self.version)
        except LoadFailed as error:
            self._machine.move(State.FAILED)
            self._log.error("restore_failed", version=self.version.name, error=error.message)
            raise WeightsLost(
                f"{cause.message}; {self.version.name}, which served before, could not be "
                f"loaded again: {error.message}"
            ) from error
        self._machine.move(State.AWAKE)
        self._log.info("restored", version=self.version.name)
