"""Carries out a run's operations.

Each kind has a method. It does all that can fail before the trainer hears of the operation, calls
the trainer (`delivery`), and returns the result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

from gateway.checkpoints.catalog import Checkpoint
from gateway.checkpoints.compatibility import check_compatible
from gateway.checkpoints.encryption import check_recipients, encrypt_version
from gateway.checkpoints.versions import WeightVersion
from gateway.identifiers import (
    CheckpointKind,
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
from gateway.runs.publisher import WeightPublisher
from gateway.runs.record import TrainingStep
from gateway.runs.recovery.replay_log import Snapshot
from gateway.runs.tools import RunTools
from gateway.runs.trainer import RunTrainer
from gateway.storage.futures.table import Outcome, Result
from gateway.workers.model_sizes import read_ahead
from tandem.errors import LoadFailed, NameTaken, UnknownModel
from tandem.v1 import trainer_pb2
from tandem.weights import new_version_name


class OperationRunner:
    def __init__(self, *, trainer: RunTrainer, tools: RunTools) -> None:
        self._run = trainer.run
        self._trainer = trainer
        self._tools = tools
        self._delivery = CallDelivery(trainer=trainer, tools=tools)
        self._publisher = WeightPublisher(trainer=trainer, delivery=self._delivery, tools=tools)
        self._checkpoints = tools.checkpoints
        self._versions = tools.versions
        self._pins = tools.checkpoints.pins
        self._data_dir = tools.settings.data_dir

    async def carry_out(self, call: Call) -> Outcome:
        """Return the outcome. Raises the operation's `TandemError`, or `RunBroken` if the trainer
        is useless."""
        match call.operation.body:
            case OptimStep() as body:
                return await self._optim_step(call, body)
            case SaveWeights() as body:
                return await self._save(call, body)
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
        self._tools.history.record(
            TrainingStep(
                run_id=self._run.id,
                seq_id=call.operation.seq_id,
                step=reply.step,
                at=time.time(),
                seconds=reply.batch_seconds + reply.seconds,
                tokens=reply.batch_tokens,
                weight_version=reply.weight_version,
                metrics={**reply.batch_metrics, **reply.metrics},
            )
        )
        return json_result(type="optim_step", metrics=dict(reply.metrics))

    # --- A trainer's state --------------------------------------------------------------------

    async def _save(self, call: Call, body: SaveWeights) -> Outcome:
        run = self._run
        if done := await self._saved_before(call, "weights", body.path):
            return json_result(type="save_weights", path=str(done.path))
        path = await self._free_path(
            "weights",
            body.path,
            size=lambda: run.expected_state_bytes,
            what="save a checkpoint",
            overwrite=body.overwrite,
        )
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
        return json_result(type="save_weights", path=str(path))

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
        return json_result(type="load_weights", path=body.path, model_id=run.id)

    # --- Weight versions ----------------------------------------------------------------------

    async def _save_for_sampler(self, call: Call, body: SaveWeightsForSampler) -> Outcome:
        """Save for a sampler. An unnamed save ends when the engine serves the new weights."""
        run, path, what = self._run, None, "publish the weights"
        if body.path and (done := await self._saved_before(call, "sampler_weights", body.path)):
            return json_result(type="save_weights_for_sampler", path=str(done.path))
        if body.path is None:
            await self._versions.check_space(expected_bytes=run.expected_version_bytes, what=what)
            await read_ahead(run.model.path, self._tools.settings)
            # Engines start while the trainer publishes.
            sampler = self._tools.samplers.ensure(
                session_id=run.session_id,
                model=run.model,
                rank=run.training.rank,
                all_weights=run.training.lora is None,
                kept=run.sampler,
            )
            sampler.start()
        else:
            path = await self._free_path(
                "sampler_weights", body.path, size=lambda: run.expected_version_bytes, what=what
            )
        with self._writing(name := call.operation.version):
            delta = path is None and run.publishes_deltas
            version, handoff = await self._publisher.publish(
                call, name, sampled=True, delta=delta, to=sampler if path is None else None
            )
            if path is not None:
                await self._put_checkpoint(path, body, version=version)
                return json_result(type="save_weights_for_sampler", path=str(path))
            assert body.sampling_session_seq_id is not None
            call.explain = lambda: (
                "the sampler is loading the new weights" if sampler.serves else sampler.explain()
            )
            try:
                await sampler.load(version, in_flight=body.kind == "inflight", handoff=handoff)
            except LoadFailed:
                run.deltas.forget()
                raise
            except asyncio.CancelledError:
                handoff = None  # the engine may still read, so the trainer frees it later
                raise
            finally:
                if handoff is not None:
                    await self._publisher.release(name)
            session = await self._tools.sampling.create_ephemeral(
                session_id=run.session_id,
                number=body.sampling_session_seq_id,
                kind=body.kind,
                version=version,
            )
            return json_result(type="save_weights_for_sampler", sampling_session_id=session.id)

    async def _export(self, call: Call, body: SaveWeightsExternal) -> Outcome:
        run = self._run
        recipients = body.age_encryption_recipients or []
        check_recipients(recipients)
        if done := await self._saved_before(call, "external_weights", body.path):
            return json_result(
                type="save_weights_external", path=str(done.path), size_bytes=done.bytes
            )
        path = await self._free_path(
            "external_weights",
            body.path,
            size=lambda: run.expected_version_bytes * (2 if recipients else 1),
            what="export the weights",
        )
        try:
            with ExitStack() as pinned:
                pinned.enter_context(self._writing(name := call.operation.version))
                version, _ = await self._publisher.publish(
                    call, name, becomes_parent=not recipients
                )
                if recipients:
                    call.waiting_for = "the files are being encrypted"
                    name = new_version_name(run_id=run.id, number=call.operation.seq_id)
                    pinned.enter_context(self._writing(name))
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

    def _writing(self, version: str) -> AbstractContextManager[None]:
        return self._checkpoints.writing(relative_version_folder(version), run_id=self._run.id)

    # --- Named checkpoints --------------------------------------------------------------------

    async def _free_path(
        self,
        kind: CheckpointKind,
        name: str,
        *,
        size: Callable[[], int],
        what: str,
        overwrite: bool = False,
    ) -> CheckpointPath:
        """Return the path of a new checkpoint of about `size` bytes. Raises `NameTaken`,
        `LimitExceeded` or `StorageFull`."""
        await self._trainer.client()  # the size is known only then
        expected = size()
        path = CheckpointPath(run_id=self._run.id, kind=kind, name=name)
        found = await self._checkpoints.find(path)
        if found is not None and not overwrite:
            hint = "; save with overwrite=True to replace it" if kind == "weights" else ""
            raise NameTaken(f"there is a checkpoint {path} already{hint}")
        await self._checkpoints.check_quota(
            owner=self._run.owner,
            expected_bytes=expected,
            replaced_bytes=found.bytes if found is not None else 0,
        )
        await self._versions.check_space(expected_bytes=expected, what=what)
        return path

    async def _saved_before(self, call: Call, kind: CheckpointKind, name: str) -> Checkpoint | None:
        if not call.operation.resumed:
            return None
        path = CheckpointPath(run_id=self._run.id, kind=kind, name=name)
        if (found := await self._checkpoints.find(path)) is None:
            return None
        folders = [found.relative_folder]
        if kind == "external_weights" and (version := await self._versions.find(found.version)):
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
