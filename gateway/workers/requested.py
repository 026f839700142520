"""The requests of runs and samplers: their asks, and the needs of their models.

Explicit bytes count. Otherwise the launcher prepares them, from the headers of the model
(`gateway.workers.needs`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.workers.asks import Asks
from gateway.workers.groups import WorkerGroup
from gateway.workers.model_sizes import known_size
from gateway.workers.needs import Needs, Prepare, engine_needs, trainer_needs
from gateway.workers.requests import WorkerRequest
from tandem.backends.memory import ModelSize
from tandem.protocol.worker import TrainingSpec
from tandem.settings.gateway import GatewaySettings
from tandem.settings.sharing import MOST_RUNS
from tandem.settings.workers import SamplerSettings


def engine_key(sampler: str, number: int) -> str:
    """Return the key of a sampler's engine with this number. Literal examples: "s-ab12/qwen/16",
    then "s-ab12/qwen/16#1"."""
    return f"{sampler}#{number}" if number else sampler


def sampler_of(key: str) -> str:
    """Return the key of the sampler of the engine with this key."""
    return key.partition("#")[0]


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
        asks: Asks,
        training: TrainingSpec,
        engines: Sequence[str],
    ) -> WorkerRequest:
        """Return the request of a trainer of the model at a path. It gets its group at one moment
        with these engines."""
        may_share = training.lora is not None and asks.share != "never"

        def needs_on(group: WorkerGroup, size: ModelSize) -> Needs:
            return trainer_needs(
                size,
                group=group,
                trainer=asks.trainer_settings(self.settings),
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
            ranks=asks.ranks,
            device_bytes=asks.memory,
            host_bytes=asks.host_memory,
            groups=(asks.group,) if asks.group else (),
            priority=asks.priority,
            together=tuple(engines),
            start_timeout=asks.trainer_start_timeout,
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
        asks: Asks,
        max_lora_rank: int,
        together: Sequence[str] = (),
    ) -> WorkerRequest:
        settings = SamplerSettings.of(self.settings.sampler).model_copy(
            update={"ranks": asks.sampler_ranks, "max_lora_rank": max_lora_rank}
        )
        request = WorkerRequest(
            key=key,
            kind="engine",
            owner=owner,
            session=session,
            model=model,
            ranks=asks.sampler_ranks,
            device_bytes=asks.sampler_memory,
            host_bytes=asks.sampler_host_memory,
            groups=(asks.sampler_group,) if asks.sampler_group else (),
            priority=asks.priority,
            together=tuple(together),
            sampler=sampler,
            start_timeout=asks.start_timeout,
        )
        return self._with_needs(
            request, lambda group, size: engine_needs(size, group=group, sampler=settings)
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
