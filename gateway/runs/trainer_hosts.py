"""The trainers of all runs. LoRA runs may share one: see "Share a trainer between LoRA runs" in
docs/sharing.md.

A LoRA run joins a trainer if `tandem.share` allows it and the trainer suits it. Then owner, base
model and way of computing are equal, and there is room for one more run. The run also uses the
trainer's engines."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.runs.run import Run
from gateway.runs.trainer_host import HostedRun, TrainerHost
from gateway.sampling.replicas import ReplicaRange
from gateway.sampling.router import SamplerRouter
from gateway.workers.request_maker import RequestMaker
from gateway.workers.requests import WorkerRequest, sampler_of
from gateway.workers.run_options import is_kept_apart
from gateway.workers.standing import is_place_free
from gateway.workers.supervisor import Supervisor
from gateway.workers.trainer_adapter import TrainerAdapter
from tandem.settings.gateway import GatewaySettings
from tandem.settings.sharing import MOST_RUNS

_SHARES = "fsdp2"
"""The backend that is known to share trainers before its first start. Trainers of other backends
say it when they serve."""


@dataclass(eq=False, kw_only=True)
class TrainerHosts:
    settings: GatewaySettings
    supervisor: Supervisor
    adapter: TrainerAdapter
    requests: RequestMaker
    samplers: SamplerRouter
    _hosts: dict[str, TrainerHost] = field(default_factory=dict, init=False)

    def list_hosts(self) -> list[TrainerHost]:
        return list(self._hosts.values())

    def get(self, key: str) -> TrainerHost | None:
        return self._hosts.get(key)

    def for_new(self, run: Run) -> TrainerHost:
        """Return the trainer of a new run: a shared one, or its own. Raises `InvalidRequest` if no
        group can have it."""
        sampler = self._sampler_of(run) if run.options.sampler else ""
        engines = self._engines(run, sampler)
        request = self._request(run, key=run.id, engines=engines, sampler=sampler)
        if run.options.share == "always" or not self._is_place_free(request):
            for host in self._hosts.values():
                if self._suits(host, run):
                    if run.options.sampler:
                        self.samplers.lend(host.sampler, run.session_id, run.model)
                    return self._joined(host, run)
        self.supervisor.check([request, *engines])
        return self._joined(self._made(run.id, run, sampler), run)

    def for_left(self, run: Run, *, key: str) -> TrainerHost:
        """Return the trainer with this key, for a run of an earlier gateway."""
        if (host := self._hosts.get(key)) is None:
            row = self.supervisor.roster.rows.get(key)
            kept = row.request.together if row is not None else ()
            sampler = sampler_of(kept[0]) if kept else ""
            if row is None and run.options.sampler:
                sampler = self._sampler_of(run)
            host = self._made(key, run, sampler)
        if host.group is not None and host.sampler and run.options.sampler:
            self.samplers.lend(host.sampler, run.session_id, run.model)
        return self._joined(host, run)

    def _joined(self, host: TrainerHost, run: Run) -> TrainerHost:
        host.runs[run.id], run.host = run, host
        if host.sampler and (allowed := ReplicaRange.of(run.options)):
            self.samplers.allow(host.sampler, allowed)
        return host

    async def place(self, run: Run) -> None:
        """Ask for the places of a run's trainer and its engines."""
        host = run.host
        engines = self._engines(run, host.sampler)
        if engines:
            await self.supervisor.place(engines, holder=host.sampler)
        request = self._request(run, key=host.key, engines=engines, sampler=host.sampler)
        await host.place(request, run.id)

    async def leave(self, host: TrainerHost, run_id: str) -> None:
        """As `TrainerHost.leave`. After its last run, nobody can join the trainer."""
        host.runs.pop(run_id, None)
        if not host.runs:
            self._hosts.pop(host.key, None)
        try:
            await host.leave(run_id)
        finally:
            left = (each.sampler for each in self._hosts.values())
            if host.sampler and host.sampler not in left:
                await self.samplers.release_unused(host.sampler)

    def _is_place_free(self, request: WorkerRequest) -> bool:
        rows = self.supervisor.roster.rows
        expected = sum(host.key not in rows for host in self._hosts.values())
        return is_place_free(self.supervisor.overview(), request, expected=expected)

    def _engines(self, run: Run, sampler: str) -> list[WorkerRequest]:
        """Return the requests of the engines that a run keeps."""
        if not sampler:
            return []
        return self.samplers.engine_requests(sampler, run.options, owner=run.owner, model=run.model)

    def _request(
        self, run: Run, *, key: str, engines: list[WorkerRequest], sampler: str
    ) -> WorkerRequest:
        return self.requests.trainer(
            key,
            owner=run.owner,
            session=run.session_id,
            model=run.model.path,
            options=run.options,
            training=run.training,
            engines=[engine.key for engine in engines],
            sampler=sampler,
        )

    def _made(self, key: str, run: Run, sampler: str) -> TrainerHost:
        if sampler:
            self.samplers.keep(sampler, sharing=run.options.sharing, apart=self._is_apart(run))
        host = self._hosts[key] = TrainerHost(
            key,
            first=run,
            sampler=sampler,
            settings=self.settings,
            supervisor=self.supervisor,
            adapter=self.adapter,
        )
        return host

    def _sampler_of(self, run: Run) -> str:
        return self.samplers.key_for(
            session_id=run.session_id,
            model_name=run.model.name,
            rank=run.training.rank,
            apart=self._is_apart(run),
        )

    def _is_apart(self, run: Run) -> bool:
        return is_kept_apart(run.options, self.requests.groups())

    def _suits(self, host: TrainerHost, run: Run) -> bool:
        first, sharing = host.first, self.settings.sharing
        same_group = run.options.group in ("", first.options.group) or (
            host.group is not None and host.group.is_meant_by(run.options.group)
        )
        return (
            first.training.lora is not None
            and run.training.lora is not None
            and "never" not in (first.options.share, run.options.share)
            and (first.options.backend == _SHARES or first.about.shares)
            and (first.owner == run.owner or sharing.across_owners)
            and (first.model.name, first.model.path) == (run.model.name, run.model.path)
            and _computed_as(first) == _computed_as(run)
            and same_group
            and len(host.runs) < MOST_RUNS
            and (not run.options.sampler or self._samples_for(host, run))
        )

    def _samples_for(self, host: TrainerHost, run: Run) -> bool:
        """Whether the trainer's engines can serve this run's adapters. They need room for the rank,
        and no run may load all weights into them."""
        alone = all(
            other.first.training.lora is not None
            for other in self._hosts.values()
            if other.sampler == host.sampler
        )
        rank = run.training.rank
        return (
            host.sampler != "" and alone and self.samplers.takes_adapters(host.sampler, rank=rank)
        )


def _computed_as(run: HostedRun) -> tuple[object, ...]:
    options = run.options
    computed = (options.backend, options.dtype, options.compile, options.priority)
    devices = (options.sharing, options.sampler_group, options.replicas, options.sampler_ranks)
    held = (options.ranks, options.shards, options.tensor_parallel, options.offload)
    return (*computed, *held, *devices)
