"""The submission of a job: all checks, then its files, then its rows."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import insert

from gateway.checkpoints.base_models import BaseModels
from gateway.checkpoints.versions import VersionStore
from gateway.identifiers import new_session_id, run_id_of
from gateway.jobs.data import checked_rows
from gateway.jobs.files import job_folder, remove_files, write_data
from gateway.jobs.job import Job, JobPlan, training_of
from gateway.jobs.life import job_spec
from gateway.jobs.registry import JobRegistry
from gateway.owners.sessions.registry import NewSession
from gateway.runs.record.identity import identity_changes
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


@dataclass(eq=False, kw_only=True)
class JobSubmission:
    """`groups` returns the declared groups."""

    registry: JobRegistry
    models: BaseModels
    versions: VersionStore
    groups: Callable[[], Sequence[WorkerGroup]]

    async def submit(
        self,
        plan: JobPlan,
        *,
        model: str,
        data: Mapping[str, str],
        name: str | None,
        tags: Sequence[str] | None,
        deadline: str,
        host_memory: str,
        owner: str,
        admin: bool,
    ) -> Job:
        """Begin a job, and return it when it is durable. `data` has the text of `train` and perhaps
        `eval`, as JSON lines. `deadline` and `host_memory` are as in `RunOptions`.

        Raises `InvalidField` for a faulty setting or row of data, `UnknownModel`, `InvalidRequest`,
        `PermissionDenied`, `LimitExceeded`, `BudgetExhausted`, `StorageFull` or `StorageFailed`."""
        registry, life = self.registry, self.registry.life
        identity = identity_changes({"name": name, "tags": tags}, None)
        configuration = configure(job_backend(plan.backend), plan.configuration)
        found = self.models.get(model)
        await asyncio.to_thread(_check_model, Path(found.path), found.name)
        options = self._options(
            plan, model=model, deadline=deadline, host_memory=host_memory, admin=admin
        )
        now = time.time()
        ends_at = options.deadline_at(now)
        if ends_at is not None and ends_at <= now:
            raise InvalidRequest(f"the deadline {deadline} has passed; choose a later one")
        contents = await asyncio.to_thread(_checked, data, getattr(configuration, "method", ""))
        session_id = new_session_id()
        run_id = run_id_of(session_id=session_id, model_seq_id=0)
        job = Job(
            run_id=run_id,
            session_id=session_id,
            owner=owner,
            model=found,
            plan=plan.model_copy(
                update={
                    "configuration": configuration.model_dump(mode="json"),
                    "deadline": ends_at,
                    "host_memory": options.host_memory if host_memory else 0,
                }
            ),
            folder=job_folder(life.settings.data_dir, run_id),
        )
        await self._check_resources(job, configuration)
        size = sum(map(len, contents.values()))
        with registry.arriving(owner):
            await self.versions.check_space(expected_bytes=size, what="keep the job's data")
            try:
                await asyncio.to_thread(write_data, job.folder, contents)
                await self._write_rows(job, identity, options, created_at=now)
            except BaseException as error:
                await asyncio.to_thread(remove_files, job.folder)
                if isinstance(error, OSError):
                    raise typed(error) from error
                raise
            registry.begin_job(job)
        life.record.identity_files.write_soon(job.run_id)
        return job

    async def _write_rows(
        self,
        job: Job,
        identity: Mapping[str, object],
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
            **identity,
            "config": plan.configuration,
            "created_at": created_at,
        }
        row = {
            "run_id": job.run_id,
            "framework": job_backend(plan.backend).framework,
            "spec": plan.model_dump(mode="json"),
            "state": "queued",
        }
        name = identity["name"] or f"{plan.backend} job"
        await self.registry.sessions.create(
            NewSession(owner=job.owner, display_name=str(name)),
            ttl=math.inf,
            session_id=job.session_id,
            beside=[insert(runs).values(run), insert(jobs).values(row)],
        )

    def _options(
        self, plan: JobPlan, *, model: str, deadline: str, host_memory: str, admin: bool
    ) -> RunOptions:
        asked: dict[str, object] = {"tandem.sampler": "none", "tandem.priority": plan.priority}
        if deadline:
            asked["tandem.deadline"] = deadline
        if host_memory:
            asked["tandem.host_memory"] = host_memory
        options = options_of(
            asked,
            None,
            model=model,
            settings=self.registry.life.settings,
            groups=self.groups(),
            admin=admin,
        )
        change = {"ranks": plan.processes, "backend": plan.backend, "group": plan.group}
        return options.model_copy(update=change)

    async def _check_resources(self, job: Job, configuration: JobConfiguration) -> None:
        """Raise `InvalidRequest` if no group has such devices or its host lacks the framework, and
        `InvalidField` if the configuration cannot use the devices."""
        life = self.registry.life
        request = await life.prepare_request(job)
        life.supervisor.check([request])
        group = next(each for each in self.groups() if each.suits(request))
        job_spec(job, group)
        configuration.validate_resources(
            JobResources(
                processes=job.plan.processes,
                device="cpu" if group.on_host else "cuda",
                device_bytes=group.device_bytes,
            )
        )


def _checked(data: Mapping[str, str], method: str) -> dict[str, bytes]:
    if not data.get("train"):
        raise InvalidField("data.train is empty; it has one JSON object in each line", field="data")
    return {name: checked_rows(name, text, method) for name, text in data.items() if text}


def _check_model(folder: Path, name: str) -> None:
    """Raise `InvalidRequest` for a model whose result could not be imported."""
    config = read_json(folder / "config.json")
    reason = why_untrained(config)
    if not reason and experts_of(config)[0]:
        reason = "has experts, and the result of a job could not be imported"
    if reason:
        raise InvalidRequest(f"the model {name} {reason}")
