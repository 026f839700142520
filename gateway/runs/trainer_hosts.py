"""Which runs share a trainer process. See docs/sharing.md, "LoRA runs of one base model".

A run that trains adapters joins a process that is there, or about to be, if it may share
(`tandem.share`) and the process suits it: the same base model, computed in the same way, of the
same owner, with room for one more. It then uses the engine of those that share it, too."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.placement.leases import Leases
from gateway.placement.places import Places
from gateway.placement.room import PlaceRequest
from gateway.runs.trainer_host import TrainerHost
from gateway.runs.training_run import TrainingRun
from gateway.sampling.router import SamplerRouter
from gateway.workers.fleet import Fleet
from tandem.settings.gateway import GatewaySettings
from tandem.settings.sharing import MOST_RUNS

_SHARES = "fsdp2"
"""The backend of which it is known before it starts that runs can share a trainer of it. Of others,
a trainer that serves says it."""


@dataclass(eq=False, kw_only=True)
class TrainerHosts:
    settings: GatewaySettings
    fleet: Fleet
    places: Places
    leases: Leases
    samplers: SamplerRouter
    _hosts: dict[str, TrainerHost] = field(default_factory=dict, init=False)

    def keys(self) -> list[str]:
        """Return the keys of the places of all trainers."""
        return list(self._hosts)

    def get(self, key: str) -> TrainerHost | None:
        return self._hosts.get(key)

    def for_new(self, run: TrainingRun) -> TrainerHost:
        """Return the trainer of a run that is being created: one that it shares, or its own. Raises
        `InvalidRequest` for what no group can give."""
        ask = self._ask(run, key=run.id, sampler=self._sampler_of(run))
        before = [
            self._ask(host.first, key=host.key, sampler=host.sampler)
            for host in self._hosts.values()
            if host.place is None
        ]
        if run.asks.share == "always" or not self.places.has_room([*before, ask]):
            for host in self._hosts.values():
                if self._suits(host, run):
                    if run.asks.sampler:
                        self.samplers.lend(host.sampler, run.session_id, run.model)
                    host.runs.add(run.id)
                    return host
        self.places.check(ask)
        return self._made(run.id, run)

    def for_left(self, run: TrainingRun, *, key: str) -> TrainerHost:
        """Return the trainer of a run of an earlier gateway, which has the place of this key."""
        if (host := self._hosts.get(key)) is not None:
            host.runs.add(run.id)
        else:
            host = self._made(key, run)
            if (place := self.places.get(key)) is not None:
                host.settle(place)
        if host.place is not None and host.sampler and run.asks.sampler:
            self.samplers.lend(host.sampler, run.session_id, run.model)
        return host

    async def leave(self, host: TrainerHost, run_id: str, reason: str) -> None:
        """As `TrainerHost.leave`; nobody joins it any more if this is the last run."""
        host.runs.discard(run_id)
        if not host.runs:
            self._hosts.pop(host.key, None)
        await host.leave(run_id, reason)

    def ask_of(self, run: TrainingRun) -> PlaceRequest:
        """Return what a run needs before it starts: the place of its trainer, and that of the
        sampler which will serve its weights."""
        assert run.trainer is not None
        return self._ask(run, key=run.trainer.host.key, sampler=run.sampler)

    def _ask(self, run: TrainingRun, *, key: str, sampler: str) -> PlaceRequest:
        """Return what a run asks for; of a sampler that was scaled, what it was scaled to."""
        asks = run.asks
        if replicas := self.places.scaled.get(sampler):
            asks = asks.model_copy(update={"replicas": replicas})
        return PlaceRequest.of_run(
            key, owner=run.owner, session_id=run.session_id, asks=asks, sampler=sampler
        )

    def _made(self, key: str, run: TrainingRun) -> TrainerHost:
        host = self._hosts[key] = TrainerHost(
            key,
            first=run,
            sampler=self._sampler_of(run) if run.asks.sampler else "",
            fleet=self.fleet,
            settings=self.settings,
            places=self.places,
            leases=self.leases,
        )
        return host

    def _sampler_of(self, run: TrainingRun) -> str:
        return self.samplers.key_for(
            session_id=run.session_id, model_name=run.model.name, rank=run.training.rank
        )

    def _suits(self, host: TrainerHost, run: TrainingRun) -> bool:
        first, sharing = host.first, self.settings.sharing
        same_group = run.asks.group in ("", first.asks.group) or (
            host.place is not None and host.place.group.is_meant_by(run.asks.group)
        )
        return (
            first.training.lora is not None
            and run.training.lora is not None
            and "never" not in (first.asks.share, run.asks.share)
            and (first.asks.backend == _SHARES or first.about.shares)
            and (first.owner == run.owner or sharing.across_owners)
            and (first.model.name, first.model.path) == (run.model.name, run.model.path)
            and _computed_as(first) == _computed_as(run)
            and same_group
            and len(host.runs) < MOST_RUNS
            and (not run.asks.sampler or self._samples_for(host, run))
        )

    def _samples_for(self, host: TrainerHost, run: TrainingRun) -> bool:
        """Whether the engine of those that share the trainer can serve another one's adapters: it
        is kept for them, has room for their rank, and nobody loads all weights into it."""
        alone = all(
            other.first.training.lora is not None
            for other in self._hosts.values()
            if other.sampler == host.sampler
        )
        rank = run.training.rank
        return (
            host.sampler != "" and alone and self.samplers.takes_adapters(host.sampler, rank=rank)
        )


def _computed_as(run: TrainingRun) -> tuple[object, ...]:
    asks = run.asks
    computed = (asks.backend, asks.dtype, asks.compile, asks.priority)
    held = (asks.ranks, asks.shards, asks.tensor_parallel, asks.offload)
    return (*computed, *held, asks.sampler_group, asks.replicas, asks.sampler_ranks)
