"""Updates of a busy engine: work in flight meets newer weights of its run.

Work follows the updates that its client chose. Without a choice, in-flight work continues with
versions that other in-flight work names. With `KEEP` it continues with any newer version of its
run. With `ABORT` it ends with the tokens that it has. It never ends without a token: then it
continues, too, as does waiting work. All other work ends before the engine takes the weights."""

from __future__ import annotations

from collections.abc import Mapping

from sampler_service.engine import Engine, StepOutput
from sampler_service.metrics import SamplerMetrics
from sampler_service.weights.loader import LoadableVersion, LoadOutcome
from sampler_service.work import QueuedSample, Updates, WaitingList, Work, request_ids
from tandem.telemetry import get_log


class InFlightWork:
    """The running work by request id and the waiting work of an engine. Its methods run in the
    engine's thread."""

    def __init__(
        self,
        engine: Engine,
        metrics: SamplerMetrics,
        *,
        waiting: WaitingList,
        running: Mapping[str, QueuedSample],
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._waiting = waiting
        self._running = running
        self._served: dict[tuple[str, bool], LoadableVersion] = {}
        """The newest version of each run that work was carried over to, and with True the newest
        one that in-flight work named."""
        self._log = get_log()

    def leads(self, version: LoadableVersion) -> bool:
        """Whether waiting in-flight work names the version, so that others follow."""
        return any(work.in_flight for work in self._waiting.work_of(version))

    def may_run_beside(self, version: LoadableVersion) -> bool:
        """Whether all running work lets the engine take these weights."""
        led = self.leads(version)
        return all(work.may_follow(version, led=led) for work in self._running.values())

    def note_arrival(self, work: Work) -> None:
        """Let new work need a newer version that earlier work was carried over to."""
        for led in (False, True):
            newest = self._served.get((work.version.run_id, led))
            if newest is not None and work.may_follow(newest, led=led):
                work.update(newest)

    def end_early(self, version: LoadableVersion) -> StepOutput:
        """End running work that a version aborts, and return its answers. The engine must be
        settled."""
        ids = [
            id_
            for id_, work in self._running.items()
            if work.updates is Updates.ABORT and work.may_follow(version, led=False)
        ]
        if not ids:
            return StepOutput()
        ended = self._engine.finish(ids)
        names = [self._running[result.id] for result in ended.results]
        self._log.info("ended_early", version=version.name, request_ids=request_ids(names))
        return ended

    def carry_over(self, outcome: LoadOutcome) -> None:
        """Let in-flight work continue with a version that serves. The engine must be settled."""
        version, led = outcome.version, self.leads(outcome.version)
        if version.run_id:
            for named in (False, True)[: 1 + led]:
                self._served[version.run_id, named] = version
        self._waiting.update(version, lambda work: work.may_follow(version, led=led))
        carried = {
            id_: work for id_, work in self._running.items() if work.may_follow(version, led=led)
        }
        if not carried:
            return
        self._engine.carry_over(list(carried), adapter=version.name if version.adapter else None)
        for work in carried.values():
            work.carry_over(version)
        self._metrics.carried_over(len(carried), outcome)
        self._log.info(
            "carried_over",
            version=version.name,
            requests=len(carried),
            request_ids=request_ids(carried.values()),
            paused_seconds=0.0 if version.adapter else round(outcome.seconds, 4),
        )

    def concerns(self, version: LoadableVersion) -> bool:
        """Whether running work continues with a version or ends for it."""
        led = self.leads(version)
        return any(work.may_follow(version, led=led) for work in self._running.values())
