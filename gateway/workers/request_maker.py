"""The requests of runs and samplers, from their options and the needs of their models.

Explicit bytes count. Otherwise the launcher prepares them, from the headers of the model
(`gateway.workers.needs`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.workers.groups import WorkerGroup
from gateway.workers.model_sizes import known_size
from gateway.workers.needs import Needs, Prepare, engine_needs, job_needs, trainer_needs
from gateway.workers.requests import WorkerRequest
from gateway.workers.run_options import RunOptions
from tandem.backends.memory import ModelSize
from tandem.protocol.worker import TrainingSpec
from tandem.settings.gateway import GatewaySettings
from tandem.settings.sharing import MOST_RUNS
from tandem.settings.workers import SamplerSettings


def engine_key(sampler: str, number: int) -> str:
    """Return the key of a sampler's engine with this number. Literal examples: "s-ab12/qwen/16",
    then "s-ab12/qwen/16#1"."""
    return f"{sampler}#{number}" if number else sampler


@dataclass(frozen=True, kw_only=True)
class RequestMaker:
    """Makes requests for workers. `groups` returns the groups of the gateway. `prepare` is the
    launcher's."""

    settings: GatewaySettings
    groups: Callable[[], Sequence[WorkerGroup]]
    prepare: Prepare

    def trainer(
        self,
        key: str,
        *,
        owner: str,
        session: str,
        model: str,
        options: RunOptions,
        training: TrainingSpec,
        engines: Sequence[str],
        sampler: str = "",
    ) -> WorkerRequest:
        """Return the request of a trainer of the model at a path. It gets its group at one moment
        with these engines of a sampler."""
        may_share = training.lora is not None and options.share != "never"

        def needs_on(group: WorkerGroup, size: ModelSize) -> Needs:
            return trainer_needs(
                size,
                group=group,
                trainer=options.trainer_settings(self.settings),
                training=training,
                snapshots=self.settings.recovery_enabled,
                runs=MOST_RUNS if may_share else 1,
            )

        request = WorkerRequest(
            key=key,
            kind="trainer",
            owner=owner,
            session=session,
            model=model,
            ranks=options.ranks,
            device_bytes=options.memory,
            host_bytes=options.host_memory,
            groups=(options.group,) if options.group else (),
            sharing=options.sharing,
            priority=options.priority,
            together=tuple(engines),
            sampler=sampler,
            start_timeout=options.trainer_start_timeout,
        )
        return self._with_needs(request, needs_on)

    def engine(
        self,
        key: str,
        *,
        sampler: str,
        owner: str,
        session: str,
        model: str,
        options: RunOptions,
        max_lora_rank: int,
        together: Sequence[str] = (),
    ) -> WorkerRequest:
        settings = SamplerSettings.of(self.settings.sampler).model_copy(
            update={"ranks": options.sampler_ranks, "max_lora_rank": max_lora_rank}
        )
        request = WorkerRequest(
            key=key,
            kind="engine",
            owner=owner,
            session=session,
            model=model,
            ranks=options.sampler_ranks,
            device_bytes=options.sampler_memory,
            host_bytes=options.sampler_host_memory,
            groups=(options.sampler_group,) if options.sampler_group else (),
            sharing=options.sharing,
            priority=options.priority,
            together=tuple(together),
            sampler=sampler,
            start_timeout=options.start_timeout,
        )
        return self._with_needs(
            request, lambda group, size: engine_needs(size, group=group, sampler=settings)
        )

    def job(self, request: WorkerRequest, training: TrainingSpec) -> WorkerRequest:
        """Return a job's request with the memory of its pod. On a host it asks for none."""
        return self._with_needs(
            request,
            lambda group, size: job_needs(
                size, group=group, ranks=request.ranks, training=training
            ),
        )

    def _with_needs(
        self, request: WorkerRequest, needs_on: Callable[[WorkerGroup, ModelSize], Needs]
    ) -> WorkerRequest:
        def needs() -> Needs:
            size, found = known_size(self.settings.data_dir / request.model), Needs()
            for group in self.groups():
                if group.suits(request):
                    found = found.or_more(needs_on(group, size))
            return found

        return self.prepare(request, needs)
