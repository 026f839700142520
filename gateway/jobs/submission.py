"""The submission of a job: all checks, then its files, then its rows."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import insert

from gateway.checkpoints.base_models import BaseModels
from gateway.checkpoints.versions import VersionStore
from gateway.identifiers import new_session_id, run_id_of
from gateway.jobs.data import checked_file
from gateway.jobs.files import job_folder, remove_files, write_data
from gateway.jobs.job import Job, JobFile, JobPlan, training_of
from gateway.jobs.life import job_spec
from gateway.jobs.registry import JobRegistry
from gateway.owners.sessions.registry import NewSession
from gateway.runs.record.identity import RunIdentity
from gateway.storage.data_directory import relative_path
from gateway.storage.drivers import typed
from gateway.storage.tables import jobs, runs
from gateway.workers.groups import WorkerGroup
from gateway.workers.run_options import RunOptions, options_of
from tandem.backends.jobs import JobConfiguration, JobResources
from tandem.backends.registry import job_backend
from tandem.backends.rendering import configure
from tandem.errors import InvalidField, InvalidRequest
from tandem.weights.model_config import experts_of, read_json, why_untrained

FILES_TTL = 7 * 86_400.0
"""The usual seconds that the files of an ended job stay."""


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """A request for a job. `data` has the text of `train` and perhaps `eval`, as JSON lines.
    `deadline` and `host_memory` are as in `RunOptions`."""

    backend: str
    configuration: Mapping[str, object]
    model: str
    data: Mapping[str, str]
    identity: RunIdentity = field(default_factory=RunIdentity)
    processes: int = 1
    group: str = ""
    host_memory: str = ""
    priority: int = 0
    max_restarts: int = 0
    deadline: str = ""
    ttl: float = FILES_TTL


@dataclass(eq=False, kw_only=True)
class JobSubmission:
    """`groups` returns the declared groups."""

    registry: JobRegistry
    models: BaseModels
    versions: VersionStore
    groups: Callable[[], Sequence[WorkerGroup]]

    async def submit(self, new: NewJob, *, owner: str, admin: bool) -> Job:
        """Begin a job, and return it when it is durable.

        Raises `InvalidField` for a faulty setting or row of data, `UnknownModel`, `InvalidRequest`,
        `PermissionDenied`, `LimitExceeded`, `BudgetExhausted`, `StorageFull` or `StorageFailed`."""
        registry, life = self.registry, self.registry.life
        new.identity.check_limits()
        backend = job_backend(new.backend)
        configuration = configure(backend, new.configuration)
        model = self.models.get(new.model)
        await asyncio.to_thread(_check_model, Path(model.path), model.name)
        options = self._options(new, admin=admin)
        now = time.time()
        deadline = options.deadline_at(now)
        if deadline is not None and deadline <= now:
            raise InvalidRequest(f"the deadline {new.deadline} has passed; choose a later one")
        checked = await asyncio.to_thread(_checked, new.data, getattr(configuration, "method", ""))
        session_id = new_session_id()
        job = Job(
            run_id=run_id_of(session_id=session_id, model_seq_id=0),
            session_id=session_id,
            owner=owner,
            model=model,
            plan=JobPlan(
                backend=backend.name,
                framework=backend.framework,
                configuration=configuration.model_dump(mode="json"),
                processes=new.processes,
                group=new.group,
                host_memory=options.host_memory if new.host_memory else 0,
                priority=new.priority,
                max_restarts=new.max_restarts,
                deadline=deadline,
                ttl=new.ttl,
                data=tuple(file for file, _ in checked),
            ),
        )
        await self._check_resources(job, configuration)
        contents = {file.name: content for file, content in checked}
        size = sum(map(len, contents.values()))
        folder = job_folder(life.settings.data_dir, job.run_id)
        with registry.arriving(owner):
            await self.versions.check_space(expected_bytes=size, what="keep the job's data")
            try:
                await asyncio.to_thread(write_data, folder, contents)
                await self._write_rows(job, new.identity, options, created_at=now)
            except BaseException as error:
                await asyncio.to_thread(remove_files, folder)
                if isinstance(error, OSError):
                    raise typed(error) from error
                raise
            registry.begin_job(job)
        life.record.identity_files.write_soon(job.run_id)
        return job

    async def _write_rows(
        self,
        job: Job,
        identity: RunIdentity,
        options: RunOptions,
        *,
        created_at: float,
    ) -> None:
        data_dir, plan = self.registry.life.settings.data_dir, job.plan
        path = relative_path(Path(job.model.path), data_dir)
        run = {
            "id": job.run_id,
            "session_id": job.session_id,
            "base_model": job.model.name,
            "model": vars(job.model) | {"path": path},
            "training": training_of(plan.configuration).model_dump(),
            "asks": options.model_dump(),
            "host": job.run_id,
            "owner": job.owner,
            "state": "active",
            **vars(identity),
            "config": plan.configuration,
            "created_at": created_at,
        }
        row = {
            "run_id": job.run_id,
            "framework": plan.framework,
            "spec": plan.model_dump(mode="json"),
            "state": job.state,
        }
        name = identity.name or f"{plan.backend} job"
        await self.registry.sessions.create(
            NewSession(owner=job.owner, display_name=name),
            ttl=math.inf,
            session_id=job.session_id,
            beside=[insert(runs).values(run), insert(jobs).values(row)],
        )

    def _options(self, new: NewJob, *, admin: bool) -> RunOptions:
        asked: dict[str, object] = {"tandem.sampler": "none", "tandem.priority": new.priority}
        if new.deadline:
            asked["tandem.deadline"] = new.deadline
        if new.host_memory:
            asked["tandem.host_memory"] = new.host_memory
        options = options_of(
            asked,
            None,
            model=new.model,
            settings=self.registry.life.settings,
            groups=self.groups(),
            admin=admin,
        )
        change = {"ranks": new.processes, "backend": new.backend, "group": new.group}
        return options.model_copy(update=change)

    async def _check_resources(self, job: Job, configuration: JobConfiguration) -> None:
        """Raise `InvalidRequest` if no group has such devices or its host lacks the framework, and
        `InvalidField` if the configuration cannot use the devices."""
        life = self.registry.life
        request = await life.prepare_request(job)
        life.supervisor.check([request])
        group = next(each for each in self.groups() if each.suits(request))
        job_spec(job, Path(job.run_id), group)
        configuration.validate_resources(
            JobResources(
                processes=job.plan.processes,
                device="cpu" if group.on_host else "cuda",
                device_bytes=group.device_bytes,
            )
        )


def _checked(data: Mapping[str, str], method: str) -> list[tuple[JobFile, bytes]]:
    if not data.get("train"):
        raise InvalidField("data.train is empty; it has one JSON object in each line", field="data")
    return [checked_file(name, text, method) for name, text in data.items() if text]


def _check_model(folder: Path, name: str) -> None:
    """Raise `InvalidRequest` for a model whose result could not be imported."""
    config = read_json(folder / "config.json")
    reason = why_untrained(config)
    if not reason and experts_of(config)[0]:
        reason = "has experts, and the result of a job could not be imported"
    if reason:
        raise InvalidRequest(f"the model {name} {reason}")
