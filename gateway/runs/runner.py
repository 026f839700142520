"""Carries out a run's operations.

Each kind has a method. It does all that can fail before the trainer hears of the operation, calls
the trainer (`delivery`), and returns the result."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from gateway.checkpoints.catalog import Checkpoint
from gateway.checkpoints.compatibility import check_compatible
from gateway.checkpoints.encryption import check_recipients, encrypt_version
from gateway.checkpoints.versions import WeightVersion
from gateway.identifiers import (
    CheckpointPath,
    relative_version_folder,
)
from gateway.runs.delivery import CallDelivery
from gateway.runs.operations import (
    AdamParams,
    Call,
    DimuonParams,
    LoadWeights,
    LossReference,
    OptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    json_result,
)
from gateway.runs.publishing import RunPublisher
from gateway.runs.record.lineage import note_parent
from gateway.runs.record.rows import TrainingStep
from gateway.runs.recovery.replay_log import Snapshot
from gateway.runs.tools import RunTools
from gateway.runs.trainer import RunTrainer
from gateway.storage.futures.table import Outcome, Result
from tandem.errors import (
    NameTaken,
    StorageFailed,
    UnknownModel,
)
from tandem.telemetry import get_log
from tandem.v1 import trainer_pb2
from tandem.weights import new_version_name


class OperationRunner:
    def __init__(self, *, trainer: RunTrainer, tools: RunTools) -> None:
        self._run = trainer.run
        self._trainer = trainer
        self._tools = tools
        self._delivery = CallDelivery(trainer=trainer, tools=tools)
        self._publisher = RunPublisher(trainer=trainer, tools=tools, delivery=self._delivery)
        self._checkpoints = tools.checkpoints
        self._versions = tools.versions
        self._pins = tools.checkpoints.pins
        self._data_dir = tools.settings.data_dir
        self._log = get_log(session_id=trainer.run.session_id, run_id=trainer.run.id)

    async def carry_out(self, call: Call) -> Outcome:
        """Return the outcome. Raises the operation's `TandemError`, or `RunBroken` if the trainer
        is useless."""
        try:
            return await self._carry_out(call)
        finally:
            self._run.timeline.end_operation(call.operation.future)

    async def _carry_out(self, call: Call) -> Outcome:
        match call.operation.body:
            case OptimStep() as body:
                return await self._optim_step(call, body)
            case SaveWeights() as body:
                return await self._save(call, body)
            case SaveWeightsForSampler(path=None) as body:
                return await self._publisher.serve(call, body)
            case SaveWeightsForSampler() as body:
                return await self._save_for_sampler(call, body)
            case SaveWeightsExternal() as body:
                return await self._export(call, body)
            case LoadWeights() as body:
                return await self._load(call, body)
            case None if call.operation.kind == "create_model":
                return json_result(type="create_model", model_id=self._run.id)
            case None | LossReference() as body:
                return await self._forward_backward(call, body)

    # --- Training -----------------------------------------------------------------------------

    async def _forward_backward(self, call: Call, loss: LossReference | None) -> Outcome:
        definition = await self._tools.definition_of(loss, session_id=self._run.session_id)
        request = trainer_pb2.ForwardBackwardRequest(loss_definition=definition)
        payload = await self._tools.journal.payload_of(call.operation)
        reply = await self._delivery.deliver(
            call, lambda client: client.forward_backward(payload), request
        )
        self._tools.metrics.rollouts_dropped.labels("stale").inc(reply.dropped_stale)
        return Result(media="protobuf", body=reply.output)

    async def _optim_step(self, call: Call, body: OptimStep) -> Outcome:
        request = trainer_pb2.OptimStepRequest()
        match body.params:
            case AdamParams() as adam:
                request.adamw.CopyFrom(trainer_pb2.AdamWParams(**adam.model_dump()))
            case DimuonParams() as dimuon:
                params = trainer_pb2.DiMuonParams(**dimuon.model_dump(exclude={"type"}))
                request.dimuon.CopyFrom(params)
        reply = await self._delivery.deliver(call, lambda client: client.stub.OptimStep, request)
        self._run.step = reply.step
        numbers = self._run.timeline.end_step(
            self._tools.timelines.workers,
            step=reply.step,
            trainer=self._run.host.key,
            accepted_at=call.operation.future.accepted_at,
            policy="kl_mean" in reply.batch_metrics,
        )
        numbers = {**reply.batch_metrics, **reply.metrics, **numbers}
        self._tools.metrics.note_step(numbers)
        step = TrainingStep(
            run_id=self._run.id,
            seq_id=call.operation.seq_id,
            step=reply.step,
            at=time.time(),
            seconds=reply.batch_seconds + reply.seconds,
            tokens=reply.batch_tokens,
            weight_version=reply.weight_version,
            metrics=numbers,
        )
        self._tools.records.record_step(step)
        self._tools.record.note_step(step.run_id, step.step, step.numbers, step.at)
        return json_result(type="optim_step", metrics=dict(reply.metrics))

    # --- A trainer's state --------------------------------------------------------------------

    async def _save(self, call: Call, body: SaveWeights) -> Outcome:
        run = self._run
        if done := await self._saved_before(call):
            return json_result(type="save_weights", path=str(done.path))
        path = await self._free_path(call, what="save a checkpoint", overwrite=body.overwrite)
        folder = call.operation.folder
        request = trainer_pb2.SaveCheckpointRequest(path=str(self._data_dir / folder))
        with self._checkpoints.writing(folder, run_id=run.id):
            reply = await self._delivery.deliver(
                call, lambda client: client.stub.SaveCheckpoint, request
            )
            await self._put_checkpoint(path, body, step=reply.step, size=reply.bytes, folder=folder)
            if reply.at_step:
                await self._trainer.taker.note_saved(
                    Snapshot(
                        seq_id=call.operation.seq_id,
                        step=reply.step,
                        folder=request.path,
                        bytes=reply.bytes,
                    )
                )
            if run.options.keep_states:
                await self._release_old_states(run.options.keep_states)
        return json_result(type="save_weights", path=str(path))

    async def _release_old_states(self, keep: int) -> None:
        try:
            await self._checkpoints.release_states(self._run.id, keep=keep)
        except StorageFailed as error:  # the next save repeats it
            self._log.warning("old_states_not_released", reason=error.message)

    async def _load(self, call: Call, body: LoadWeights) -> Outcome:
        run = self._run
        async with self._checkpoints.reading(
            body.path, readers=body.readers, trainable=True
        ) as checkpoint:
            if checkpoint.base_model != run.model.name and call.operation.seq_id > 0:
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
            request = trainer_pb2.LoadCheckpointRequest(
                path=str(self._data_dir / checkpoint.folder),
                optimizer=body.optimizer,
            )
            folder = checkpoint.relative_folder
            self._pins.pin(folder)  # for a replay
            reply = await self._delivery.deliver(
                call,
                lambda client: client.stub.LoadCheckpoint,
                request,
                release=lambda: self._pins.unpin(folder),
            )
        run.step = reply.step
        note_parent(self._tools.records.database, run.id, checkpoint.path.run_id, reply.step)
        self._tools.record.identity_files.write_soon(run.id)
        return json_result(type="load_weights", path=body.path, model_id=run.id)

    # --- Named versions ----------------------------------------------------------------------

    async def _save_for_sampler(self, call: Call, body: SaveWeightsForSampler) -> Outcome:
        if done := await self._saved_before(call):
            return json_result(type="save_weights_for_sampler", path=str(done.path))
        path = await self._free_path(call, what="publish the weights")
        with self._publisher.writing(name := call.operation.version):
            version = await self._publisher.publish(call, name, sampled=True)
            await self._put_checkpoint(path, body, version=version)
        return json_result(type="save_weights_for_sampler", path=str(path))

    async def _export(self, call: Call, body: SaveWeightsExternal) -> Outcome:
        run = self._run
        recipients = body.age_encryption_recipients or []
        check_recipients(recipients)
        if done := await self._saved_before(call):
            return json_result(
                type="save_weights_external", path=str(done.path), size_bytes=done.bytes
            )
        copies = 2 if recipients else 1
        path = await self._free_path(call, what="export the weights", copies=copies)
        try:
            with ExitStack() as pinned:
                pinned.enter_context(self._publisher.writing(name := call.operation.version))
                version = await self._publisher.publish(call, name, becomes_parent=not recipients)
                if recipients:
                    call.waiting_for = "the files are being encrypted"
                    name = new_version_name(run_id=run.id, number=call.operation.seq_id)
                    pinned.enter_context(self._publisher.writing(name))
                    folder = self._versions.path_of(name)
                    size = await encrypt_version(
                        Path(version.path), Path(folder), name=name, recipients=recipients
                    )
                    version = replace(
                        version, name=name, path=folder, parent=version.name, bytes=size
                    )
                    await self._versions.add_version(version)
                await self._put_checkpoint(path, body, version=version)
        finally:
            if recipients:  # the plain files are no longer needed
                self._checkpoints.mark(run.id)
        return json_result(type="save_weights_external", path=str(path), size_bytes=version.bytes)

    # --- Named checkpoints --------------------------------------------------------------------

    async def _free_path(
        self, call: Call, *, what: str, copies: int = 1, overwrite: bool = False
    ) -> CheckpointPath:
        """Return the path of a named save, after a look at the room for so many `copies`. Raises
        `NameTaken`, `LimitExceeded` or `StorageFull`."""
        run, path = self._run, call.operation.checkpoint
        assert path is not None
        await self._trainer.client()  # the size is known only then
        is_state = path.kind == "weights"
        size = run.expected_state_bytes if is_state else copies * run.expected_version_bytes
        found = await self._checkpoints.find(path)
        if found is not None and not overwrite:
            hint = "; save with overwrite=True to replace it" if is_state else ""
            raise NameTaken(f"there is a checkpoint {path} already{hint}")
        await self._checkpoints.check_quota(
            owner=run.owner,
            expected_bytes=size,
            replaced_bytes=found.bytes if found is not None else 0,
        )
        await self._versions.check_space(expected_bytes=size, what=what)
        return path

    async def _saved_before(self, call: Call) -> Checkpoint | None:
        """Return the checkpoint that an earlier delivery of a named save has made."""
        path = call.operation.checkpoint
        if not call.operation.resumed or path is None:
            return None
        if (found := await self._checkpoints.find(path)) is None:
            return None
        folders = [found.relative_folder]
        if path.kind == "external_weights":
            version = await self._versions.find(found.version)
            if version is not None:
                folders.append(relative_version_folder(version.parent))  # the plain version
        return found if call.operation.folder in folders else None

    async def _put_checkpoint(
        self,
        path: CheckpointPath,
        body: SaveWeights | SaveWeightsForSampler | SaveWeightsExternal,
        *,
        step: int = 0,
        size: int = 0,
        folder: str = "",
        version: WeightVersion | None = None,
    ) -> None:
        now, ttl = time.time(), body.ttl_seconds
        await self._checkpoints.put(
            Checkpoint(
                path=path,
                base_model=self._run.model.name,
                folder=folder,
                version=version.name if version is not None else "",
                step=version.step if version is not None else step,
                bytes=version.bytes if version is not None else size,
                optimizer=bool(folder),
                created_at=now,
                owner=self._run.owner,
                user_metadata=(
                    None if isinstance(body, SaveWeightsExternal) else body.user_metadata
                ),
                expires_at=now + ttl if ttl is not None else None,
            )
        )
