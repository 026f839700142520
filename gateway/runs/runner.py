"""How the operations of one run are carried out by its trainer.

Each kind has two steps. `prepare` does everything that can fail before the trainer hears of the
operation. `carry_out` calls the trainer and returns the result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from gateway.checkpoints.catalog import Checkpoint, CheckpointCatalog
from gateway.checkpoints.compatibility import check_compatible
from gateway.checkpoints.encryption import check_recipients, encrypt_version
from gateway.checkpoints.versions import VersionStore, WeightVersion
from gateway.futures.table import Outcome, Result
from gateway.identifiers import (
    CheckpointPath,
    check_name,
    new_state_folder,
    relative_state_folder,
    relative_version_folder,
)
from gateway.metrics import Metrics
from gateway.runs.journal import Journal
from gateway.runs.operations import (
    AdamParams,
    Call,
    DimuonParams,
    LoadWeights,
    LossDefinitions,
    LossReference,
    Operation,
    OptimStep,
    Prepared,
    RunBroken,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    TrainerRequest,
    json_result,
)
from gateway.runs.training_run import TrainingRun
from gateway.sampling.sampler import SamplerRouter
from gateway.sampling.sessions import SamplingSessionRegistry
from gateway.usage.meter import Subject, TrainerReply, UsageMeter
from gateway.workers.clients import Method, TrainerClient, WorkerUnavailable
from tandem.errors import InternalError, NameTaken, TandemError, UnknownModel, from_failure
from tandem.telemetry import get_log
from tandem.v1 import common_pb2, trainer_pb2
from tandem.weights import new_version_name

_DELIVERIES = 3
EXIT_REPORT_PATIENCE = 3.0
"""Seconds within which the launcher reports the end of a trainer whose connection broke."""

Request = TypeVar("Request", bound=TrainerRequest)
Reply = TypeVar("Reply", bound=TrainerReply)


@dataclass(frozen=True)
class RunnerTools:
    """What the operations of every run use besides their trainer. `loss_definitions` has, by
    `loss_fn`, what clients registered."""

    journal: Journal
    checkpoints: CheckpointCatalog
    versions: VersionStore
    samplers: SamplerRouter
    sampling: SamplingSessionRegistry
    usage: UsageMeter
    metrics: Metrics
    loss_definitions: Mapping[str, LossDefinitions]
    data_dir: Path


class OperationRunner:
    """Both steps raise the `TandemError` that is the operation's outcome. `carry_out` raises
    `RunBroken` after which the trainer is of no use any more."""

    def __init__(self, *, run: TrainingRun, client: TrainerClient, tools: RunnerTools) -> None:
        self._run = run
        self._client = client
        self._tools = tools
        self._checkpoints = tools.checkpoints
        self._versions = tools.versions
        self._pins = tools.checkpoints.pins
        self._subject = Subject(
            id=run.id, session_id=run.session_id, owner=run.owner, base_model=run.model.name
        )
        self._log = get_log(session_id=run.session_id, run_id=run.id)

    async def prepare(self, operation: Operation, /) -> Prepared:
        match operation.body:
            case None | LossReference() as body:
                return await self._prepare_forward_backward(operation, body)
            case OptimStep() as body:
                return self._prepare_optim_step(operation, body)
            case SaveWeights() as body:
                return await self._prepare_save(operation, body)
            case SaveWeightsForSampler() as body:
                return await self._prepare_publish(operation, body)
            case SaveWeightsExternal() as body:
                return await self._prepare_export(operation, body)
            case LoadWeights() as body:
                return await self._prepare_load(operation, body)

    async def carry_out(self, prepared: Prepared, call: Call, /) -> Outcome:
        operation = prepared.operation
        prepared.request.header.CopyFrom(
            common_pb2.OperationHeader(
                operation_id=operation.future.request_id,
                session_id=self._run.session_id,
                run_id=self._run.id,
                # The trainer counts from 1, and counts the creation of the run, which may be a
                # load; the client counts from 1 what comes after it.
                seq_id=operation.seq_id + 1,
                previous_seq_id=call.previous_seq_id + 1 if call.previous_seq_id >= 0 else 0,
            )
        )
        try:
            return await self._carry_out(prepared, call)
        finally:
            if prepared.folder:
                self._pins.unpin_for_run(prepared.folder, run_id=self._run.id)

    async def _carry_out(self, prepared: Prepared, call: Call) -> Outcome:
        operation = prepared.operation
        match operation.body, prepared.request:
            case _, trainer_pb2.ForwardBackwardRequest() as request:
                return await self._forward_backward(operation, request)
            case _, trainer_pb2.OptimStepRequest() as request:
                return await self._optim_step(operation, request, call)
            case SaveWeights() as body, trainer_pb2.SaveCheckpointRequest() as request:
                return await self._save(prepared, request, body)
            case SaveWeightsForSampler() as body, trainer_pb2.PublishRequest() as request:
                return await self._save_for_sampler(prepared, request, body, call)
            case SaveWeightsExternal() as body, trainer_pb2.PublishRequest() as request:
                return await self._export(prepared, request, body, call)
            case LoadWeights() as body, trainer_pb2.LoadCheckpointRequest() as request:
                return await self._load(prepared, request, body)
        raise AssertionError(f"{operation.kind} was prepared as another kind")

    async def _deliver(
        self,
        operation: Operation,
        method: Method[Request, Reply],
        request: Request,
    ) -> Reply:
        """Call the trainer. Raises the failure that it reports.

        If the connection breaks and the trainer lives, the request is sent again: the trainer
        answers what it has applied already from memory. If the trainer died, the end of the run
        cancels this call while it waits for the launcher's report.
        """
        for attempt in range(_DELIVERIES):
            try:
                reply = await self._client.call(method, request)
            except WorkerUnavailable as error:
                self._log.warning("connection_broke", attempt=attempt, reason=str(error))
                await asyncio.sleep(EXIT_REPORT_PATIENCE)
            except TandemError as error:
                raise RunBroken(error) from error
            else:
                self._tools.usage.record_reply(
                    operation.usage_kind, self._subject, reply, ranks=self._run.ranks
                )
                if reply.HasField("failure"):
                    raise from_failure(reply.failure)
                return reply
        raise RunBroken(InternalError("the connection to the trainer broke again and again"))

    # --- Training -----------------------------------------------------------------------------

    async def _prepare_forward_backward(
        self, operation: Operation, loss: LossReference | None
    ) -> Prepared:
        request = trainer_pb2.ForwardBackwardRequest()
        if loss is not None and (known := self._tools.loss_definitions.get(loss.loss_fn)):
            request.loss_definition = await known.definition(
                loss.loss_id, session_id=self._run.session_id
            )
        request.payload = await self._tools.journal.payload_of(operation)
        return Prepared(operation, request)

    async def _forward_backward(
        self, operation: Operation, request: trainer_pb2.ForwardBackwardRequest
    ) -> Outcome:
        reply = await self._deliver(operation, self._client.stub.ForwardBackward, request)
        return Result(media="protobuf", body=reply.output)

    def _prepare_optim_step(self, operation: Operation, body: OptimStep) -> Prepared:
        request = trainer_pb2.OptimStepRequest()
        match body.params:
            case AdamParams() as adam:
                request.adamw.CopyFrom(trainer_pb2.AdamWParams(**adam.model_dump()))
            case DimuonParams() as dimuon:
                params = trainer_pb2.DiMuonParams(**dimuon.model_dump(exclude={"type"}))
                request.dimuon.CopyFrom(params)
        return Prepared(operation, request)

    async def _optim_step(
        self, operation: Operation, request: trainer_pb2.OptimStepRequest, call: Call
    ) -> Outcome:
        request.gradients_incomplete = call.gradients_incomplete
        reply = await self._deliver(operation, self._client.stub.OptimStep, request)
        self._run.step = reply.step
        return json_result(type="optim_step", metrics=dict(reply.metrics))

    # --- A trainer's state --------------------------------------------------------------------

    async def _prepare_save(self, operation: Operation, body: SaveWeights) -> Prepared:
        run = self._run
        path = CheckpointPath(run_id=run.id, kind="weights", name=check_name(body.path))
        replaced = await self._check_free(path, overwrite=body.overwrite)
        await self._check_room(
            run.expected_state_bytes, what="save a checkpoint", replaced=replaced
        )
        folder = new_state_folder(self._tools.data_dir, run_id=run.id, name=body.path)
        relative = relative_state_folder(folder)
        self._pins.pin_for_run(relative, run_id=run.id)
        request = trainer_pb2.SaveCheckpointRequest(path=str(folder))
        return Prepared(operation, request, path=path, folder=relative)

    async def _save(
        self, prepared: Prepared, request: trainer_pb2.SaveCheckpointRequest, body: SaveWeights
    ) -> Outcome:
        reply = await self._deliver(prepared.operation, self._client.stub.SaveCheckpoint, request)
        await self._put_checkpoint(
            prepared.path,
            folder=request.path,
            step=reply.step,
            size=reply.bytes,
            ttl_seconds=body.ttl_seconds,
            user_metadata=body.user_metadata,
        )
        return json_result(type="save_weights", path=str(prepared.path))

    async def _prepare_load(self, operation: Operation, body: LoadWeights) -> Prepared:
        run = self._run
        checkpoint = await self._checkpoints.pin_for_training(
            body.path, run_id=run.id, readers=body.readers
        )
        try:
            if checkpoint.base_model != run.model.name and operation.seq_id > 0:
                raise UnknownModel(
                    f"{body.path!r} is of the base model {checkpoint.base_model!r}, this run of "
                    f"{run.model.name!r}"
                )
            check_compatible(
                path=body.path,
                saved=(await self._checkpoints.origin(checkpoint.path.run_id)).training,
                here=run.training,
                optimizer=body.optimizer,
            )
        except TandemError:
            self._pins.unpin_for_run(checkpoint.relative_folder, run_id=run.id)
            raise
        request = trainer_pb2.LoadCheckpointRequest(
            path=checkpoint.folder, optimizer=body.optimizer
        )
        return Prepared(operation, request, folder=checkpoint.relative_folder)

    async def _load(
        self, prepared: Prepared, request: trainer_pb2.LoadCheckpointRequest, body: LoadWeights
    ) -> Outcome:
        reply = await self._deliver(prepared.operation, self._client.stub.LoadCheckpoint, request)
        self._run.step = reply.step
        return json_result(type="load_weights", path=body.path, model_id=self._run.id)

    # --- Weight versions ----------------------------------------------------------------------

    async def _prepare_publish(self, operation: Operation, body: SaveWeightsForSampler) -> Prepared:
        run, path, what = self._run, None, "publish the weights"
        if body.path is None:
            await self._versions.check_space(expected_bytes=run.expected_version_bytes, what=what)
        else:
            path = CheckpointPath(run_id=run.id, kind="sampler_weights", name=check_name(body.path))
            await self._check_free(path)
            await self._check_room(run.expected_version_bytes, what=what)
        return Prepared(operation, self._new_publish_request(), path=path)

    async def _save_for_sampler(
        self,
        prepared: Prepared,
        request: trainer_pb2.PublishRequest,
        body: SaveWeightsForSampler,
        call: Call,
    ) -> Outcome:
        """An unnamed save ends when the engine serves the new weights, not before."""
        run, name = self._run, request.version.name
        with self._pins.pinned(relative_version_folder(name)):
            version, size = await self._publish(prepared.operation, request)
            call.release()
            run.newest = name
            if prepared.path is not None:
                await self._put_checkpoint(
                    prepared.path,
                    version=name,
                    step=version.step,
                    size=size,
                    ttl_seconds=body.ttl_seconds,
                    user_metadata=body.user_metadata,
                )
                return json_result(type="save_weights_for_sampler", path=str(prepared.path))
            assert body.sampling_session_seq_id is not None
            call.waiting_for = "the sampler is loading the new weights"
            sampler = self._tools.samplers.ensure(
                session_id=run.session_id, model=run.model, rank=run.training.rank
            )
            await sampler.load(version)
            session = await self._tools.sampling.create_ephemeral(
                session_id=run.session_id,
                number=body.sampling_session_seq_id,
                kind=body.kind,
                version=version,
            )
            return json_result(type="save_weights_for_sampler", sampling_session_id=session.id)

    async def _prepare_export(self, operation: Operation, body: SaveWeightsExternal) -> Prepared:
        run = self._run
        path = CheckpointPath(run_id=run.id, kind="external_weights", name=check_name(body.path))
        await self._check_free(path)
        recipients = body.age_encryption_recipients or []
        check_recipients(recipients)
        await self._check_room(
            run.expected_version_bytes * (2 if recipients else 1), what="export the weights"
        )
        return Prepared(operation, self._new_publish_request(), path=path)

    async def _export(
        self,
        prepared: Prepared,
        request: trainer_pb2.PublishRequest,
        body: SaveWeightsExternal,
        call: Call,
    ) -> Outcome:
        """Publish the weights for download only."""
        recipients = body.age_encryption_recipients or []
        try:
            with ExitStack() as pinned:
                name = request.version.name
                pinned.enter_context(self._pins.pinned(relative_version_folder(name)))
                version, size = await self._publish(
                    prepared.operation, request, becomes_parent=not recipients
                )
                call.release()
                if recipients:
                    call.waiting_for = "the files are being encrypted"
                    name = self._new_version_name()
                    pinned.enter_context(self._pins.pinned(relative_version_folder(name)))
                    version, size = await self._encrypt(version, recipients, name=name)
                await self._put_checkpoint(
                    prepared.path,
                    version=version.name,
                    step=version.step,
                    size=size,
                    ttl_seconds=body.ttl_seconds,
                )
        finally:
            if recipients:  # nobody uses the plain files any more
                self._checkpoints.mark(self._run.id)
        return json_result(type="save_weights_external", path=str(prepared.path), size_bytes=size)

    async def _publish(
        self,
        operation: Operation,
        request: trainer_pb2.PublishRequest,
        *,
        becomes_parent: bool = True,
    ) -> tuple[WeightVersion, int]:
        """Let the trainer write a weight version; return it with its bytes."""
        run = self._run
        request.parent = run.parent
        reply = await self._deliver(operation, self._client.stub.Publish, request)
        version = WeightVersion(
            name=request.version.name,
            path=reply.version.path or request.version.path,
            run_id=run.id,
            step=reply.version.step,
            base_model=run.model.name,
            adapter=reply.version.adapter,
        )
        await self._versions.add_version(version, parent=run.parent, size=reply.bytes)
        if becomes_parent:
            self._pins.pin(relative_version_folder(version.name))
            if run.parent:
                self._pins.unpin(relative_version_folder(run.parent))
            run.parent = version.name
        run.version_bytes = reply.bytes
        self._tools.metrics.published_bytes.inc(reply.bytes)
        self._log.info(
            "published", version=version.name, bytes=reply.bytes, seconds=round(reply.seconds, 4)
        )
        return version, reply.bytes

    async def _encrypt(
        self, plain: WeightVersion, recipients: Sequence[str], *, name: str
    ) -> tuple[WeightVersion, int]:
        """Write a version of encrypted files; return it with its bytes."""
        sealed = replace(plain, name=name, path=self._versions.path_of(name))
        size = await encrypt_version(
            Path(plain.path), Path(sealed.path), name=name, recipients=recipients
        )
        await self._versions.add_version(sealed, parent=plain.name, size=size)
        return sealed, size

    def _new_publish_request(self) -> trainer_pb2.PublishRequest:
        name = self._new_version_name()
        version = common_pb2.WeightVersion(
            name=name, path=self._versions.path_of(name), run_id=self._run.id
        )
        return trainer_pb2.PublishRequest(version=version)

    def _new_version_name(self) -> str:
        self._run.published += 1
        return new_version_name(run_id=self._run.id, number=self._run.published)

    # --- Named checkpoints --------------------------------------------------------------------

    async def _check_free(self, path: CheckpointPath, *, overwrite: bool = False) -> int:
        """Return the bytes of the checkpoint that would be replaced. Raises `NameTaken`."""
        found = await self._checkpoints.find(path)
        if found is None:
            return 0
        if not overwrite:
            hint = "; save with overwrite=True to replace it" if path.kind == "weights" else ""
            raise NameTaken(f"there is a checkpoint {path} already{hint}")
        return found.bytes

    async def _check_room(self, expected: int, *, what: str, replaced: int = 0) -> None:
        """Raises `LimitExceeded` or `StorageFull`."""
        await self._checkpoints.check_quota(
            owner=self._run.owner, expected_bytes=expected, replaced_bytes=replaced
        )
        await self._versions.check_space(expected_bytes=expected, what=what)

    async def _put_checkpoint(
        self,
        path: CheckpointPath | None,
        *,
        step: int,
        size: int,
        ttl_seconds: int | None,
        user_metadata: Mapping[str, str] | None = None,
        folder: str = "",
        version: str = "",
    ) -> None:
        """Give a saved state (`folder`) or a weight version (`version`) its name."""
        assert path is not None
        now = time.time()
        await self._checkpoints.put(
            Checkpoint(
                path=path,
                base_model=self._run.model.name,
                folder=folder,
                version=version,
                step=step,
                bytes=size,
                optimizer=bool(folder),
                created_at=now,
                owner=self._run.owner,
                user_metadata=user_metadata,
                expires_at=now + ttl_seconds if ttl_seconds is not None else None,
            )
        )
