"""Which full weight version the engine has loaded, and how it switches to another."""

from __future__ import annotations

from sampler_service.engine import EngineState, WeightsTouched
from sampler_service.metrics import SamplerMetrics
from sampler_service.weights.adapters import AdapterCache
from sampler_service.weights.loader import Loader, LoadOutcome, WeightVersion
from tandem.errors import LoadFailed
from tandem.telemetry import get_log


class WeightsLost(LoadFailed):
    """Neither the new version nor the previous one could be loaded: nothing can be served."""

    type = LoadFailed.type


class WeightSwitch:
    """Literal use, in the engine's thread while the engine is idle:
    `outcome = switch.switch_to(version)`."""

    def __init__(
        self,
        loader: Loader,
        adapters: AdapterCache,
        *,
        version: WeightVersion,
        metrics: SamplerMetrics,
    ) -> None:
        """`version` is what the engine was started with."""
        self._loader = loader
        self._adapters = adapters
        self._metrics = metrics
        self._log = get_log()
        self.version = version
        self.state = EngineState.AWAKE
        metrics.state(self.state)
        metrics.version(version)

    def switch_to(self, target: WeightVersion) -> LoadOutcome:
        """Load a version and drop all adapters. Raises `LoadFailed` if the previous version goes on
        serving, `WeightsLost` if it cannot."""
        self._move_to(EngineState.LOADING)
        try:
            outcome = self._loader.load(target)
        except LoadFailed as error:
            self.record_failure(target, error)
            if isinstance(error, WeightsTouched):
                self._restore(error)
            self._move_to(EngineState.AWAKE)
            raise LoadFailed(error.message) from error
        self._adapters.clear()
        self.version = target
        self._move_to(EngineState.AWAKE)
        self._metrics.loaded(outcome)
        self.log_loaded(outcome)
        return outcome

    def engine_failed(self) -> None:
        """Enter `failed`, unless a failed switch has done so."""
        if self.state is not EngineState.FAILED:
            self._move_to(EngineState.FAILED)

    def log_loaded(self, outcome: LoadOutcome) -> None:
        self._log.info(
            "loaded",
            version=outcome.version.name,
            seconds=round(outcome.seconds, 4),
            bytes=outcome.bytes,
            canary_difference=outcome.canary_difference,
        )

    def record_failure(self, version: WeightVersion, error: LoadFailed) -> None:
        self._metrics.load_failed()
        self._log.error("load_failed", version=version.name, error=error.message)

    def _restore(self, cause: WeightsTouched) -> None:
        """Load the previous version again."""
        self._adapters.clear()
        try:
            self._loader.load(self.version)
        except LoadFailed as error:
            self._move_to(EngineState.FAILED)
            self._log.error("restore_failed", version=self.version.name, error=error.message)
            raise WeightsLost(
                f"{cause.message}; {self.version.name}, which served before, could not be "
                f"loaded again: {error.message}"
            ) from error
        self._log.info("restored", version=self.version.name)

    def _move_to(self, state: EngineState) -> None:
        self.state = self.state.move_to(state)
        self._metrics.state(state)
