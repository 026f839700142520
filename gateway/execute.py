"""How each kind of operation is carried out, and what is sent to the client for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import orjson

from gateway.checkpoints import Checkpoint
from gateway.clients import TrainerClient, WorkerUnavailable
from gateway.compatible import check_compatible
from gateway.custom_losses import CustomLosses
from gateway.dispatch import Call, EndsRun, Send
from gateway.exports import check_recipients, encrypt_version
from gateway.fleet import FENCING_TOKEN
from gateway.futures import Outcome, Result
from gateway.metrics import Metrics
from gateway.names import (
    CheckpointPath,
    check_name,
    check_ttl,
    checkpoint_folder,
    parse_checkpoint_path,
    place_of_folder,
)
from gateway.operations import (
    AdamParams,
    Body,
    DimuonParams,
    LoadWeights,
    Operation,
    OptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    UseCustomLoss,
)
from gateway.sampler import Sampler
from gateway.sampling import SamplingSessions
from gateway.usage import RunMeter, TrainerReply
from gateway.versions import Version, Versions
from tandem.errors import (
    InternalError,
    InvalidRequest,
    NameTaken,
    TandemError,
    UnknownModel,
    from_failure,
)
from tandem.settings import GatewaySettings
from tandem.telemetry import get_log
from tandem.v1 import common_pb2, trainer_pb2
from tandem.weights import new_version_name

Reply = TypeVar("Reply", bound=TrainerReply)

_REDELIVERIES = 2


@dataclass
class RunFacts:
    """What a run's operations change and need. `busy_versions`: their saves are under way."""

    run_id: str
    session_id: str
    base_model: str
    step: int = 0
    published: int = 0
    parent: str = ""
    version_bytes: int = 0
    busy_versions: set[str] = field(default_factory=set)


class Executor:
    """Implements `dispatch.Prepare` for one run.

    `fate` waits for the launcher's word after the connection broke: the error that ended the
    run, or None when the trainer lives after all.
    """

    def __init__(
        self,
        *,
        facts: RunFacts,
        client: TrainerClient,
        sampler: Callable[[], Sampler],
        sampling: SamplingSessions,
        versions: Versions,
        custom_losses: CustomLosses,
        metrics: Metrics,
        meter: RunMeter,
        settings: GatewaySettings,
        fate: Callable[[], Awaitable[TandemError | None]],
    ) -> None:
        self._facts = facts
        self._client = client
        self._sampler = sampler
        self._sampling = sampling
        self._versions = versions
        self._custom_losses = custom_losses
        self._metrics = metrics
        self._meter = meter
        self._settings = settings
        self._fate = fate
        self._log = get_log(session_id=facts.session_id, run_id=facts.run_id)

    async def __call__(self, operation: Operation, /) -> Send:
        match operation.body:
            case None:
                return await self._forward_backward(operation)
            case UseCustomLoss() as body:
                definition = await self._custom_losses.definition(
                    body.loss_id, session_id=self._facts.session_id
                )
                return await self._forward_backward(operation, custom_loss=definition)
            case OptimStep() as body:
                return partial(self._optim_step, operation, body)
            case SaveWeights() as body:
                return await self._save_weights(operation, body)
            case SaveWeightsForSampler() as body:
                return await self._save_for_sampler(operation, body)
            case SaveWeightsExternal() as body:
                return await self._save_external(operation, body)
            case LoadWeights() as body:
                return await self._load_weights(operation, body)

    async def _forward_backward(self, operation: Operation, *, custom_loss: bytes = b"") -> Send:
        payload = (
            operation.payload
            if operation.payload is not None
            else await asyncio.to_thread(operation.read_payload)
        )

        async def send(call: Call) -> Outcome:
            request = trainer_pb2.ForwardBackwardRequest(
                header=self._header(operation, call), payload=payload, custom_loss=custom_loss
            )
            reply = await self._deliver(operation, lambda: self._client.forward_backward(request))
            if reply.HasField("failure"):
                return from_failure(reply.failure)
            return Result(media="protobuf", body=reply.output)

        return send

    async def _optim_step(self, operation: Operation, body: OptimStep, call: Call) -> Outcome:
        request = trainer_pb2.OptimStepRequest(
            header=self._header(operation, call),
            gradients_incomplete=call.gradients_incomplete,
        )
        match body.params:
            case AdamParams() as adam:
                request.adamw.CopyFrom(trainer_pb2.AdamWParams(**adam.model_dump()))
            case DimuonParams() as dimuon:
                params = trainer_pb2.DiMuonParams(**dimuon.model_dump(exclude={"type"}))
                request.dimuon.CopyFrom(params)
        reply = await self._deliver(operation, lambda: self._client.optim_step(request))
        if reply.HasField("failure"):
            return from_failure(reply.failure)
        self._facts.step = reply.step
        return json_result(type="optim_step", metrics=dict(reply.metrics))

    async def _save_for_sampler(self, operation: Operation, body: SaveWeightsForSampler) -> Send:
        facts = self._facts
        path = None
        if body.path is not None:
            path = CheckpointPath(
                run_id=facts.run_id, kind="sampler_weights", name=check_name(body.path)
            )
            await self._check_free(path, overwrite=False)
        await self._versions.check_space(
            expected_bytes=facts.version_bytes, what="publish the weights"
        )
        name = self._new_name()

        async def send(call: Call) -> Outcome:
            facts.busy_versions.add(name)
            try:
                version, size = await self._publish(operation, call, name)
                call.release()
                if path is not None:
                    return await self._name_version(path, version, size, body)
                return await self._serve_version(version, call, body)
            finally:
                facts.busy_versions.discard(name)

        return send

    async def _publish(self, operation: Operation, call: Call, name: str) -> tuple[Version, int]:
        facts = self._facts
        request = trainer_pb2.PublishRequest(
            header=self._header(operation, call),
            version=common_pb2.WeightVersion(
                name=name, path=self._versions.path_of(name), run_id=facts.run_id
            ),
            parent=facts.parent,
        )
        reply = await self._deliver(operation, lambda: self._client.publish(request))
        if reply.HasField("failure"):
            self._log.error("publish_failed", version=name, reason=reply.failure.message)
            raise from_failure(reply.failure)
        version = Version(
            name=name,
            path=reply.version.path or request.version.path,
            run_id=facts.run_id,
            step=reply.version.step,
            base_model=facts.base_model,
            adapter=reply.version.adapter,
        )
        await self._versions.add_version(version, parent=facts.parent, size=reply.bytes)
        facts.parent = name
        facts.version_bytes = reply.bytes
        self._metrics.published_bytes.inc(reply.bytes)
        self._log.info(
            "published", version=name, bytes=reply.bytes, seconds=round(reply.seconds, 4)
        )
        return version, reply.bytes

    async def _name_version(
        self, path: CheckpointPath, version: Version, size: int, body: SaveWeightsForSampler
    ) -> Outcome:
        await self._put(
            path,
            version=version.name,
            step=version.step,
            size=size,
            ttl_seconds=body.ttl_seconds,
            user_metadata=body.user_metadata,
        )
        return json_result(type="save_weights_for_sampler", path=str(path))

    async def _save_external(self, operation: Operation, body: SaveWeightsExternal) -> Send:
        """Publishes the weights as they are now, for download alone."""
        facts = self._facts
        path = CheckpointPath(
            run_id=facts.run_id, kind="external_weights", name=check_name(body.path)
        )
        await self._check_free(path, overwrite=False)
        recipients = body.age_encryption_recipients or []
        check_recipients(recipients)
        await self._versions.check_space(
            expected_bytes=facts.version_bytes * (2 if recipients else 1),
            what="export the weights",
        )
        plain, sealed = self._new_name(), self._new_name() if recipients else ""

        async def send(call: Call) -> Outcome:
            facts.busy_versions |= {plain, sealed}
            parent = facts.parent
            try:
                version, size = await self._publish(operation, call, plain)
                call.release()
                if recipients:
                    facts.parent = parent if facts.parent == plain else facts.parent
                    call.waiting_for = "the files are being encrypted"
                    version, size = await self._encrypt(version, recipients, name=sealed)
                await self._put(
                    path,
                    version=version.name,
                    step=version.step,
                    size=size,
                    ttl_seconds=body.ttl_seconds,
                    user_metadata=None,
                )
            finally:
                facts.busy_versions -= {plain, sealed}
            return json_result(type="save_weights_external", path=str(path), size_bytes=size)

        return send

    def _new_name(self) -> str:
        self._facts.published += 1
        return new_version_name(run_id=self._facts.run_id, number=self._facts.published)

    async def _serve_version(
        self, version: Version, call: Call, body: SaveWeightsForSampler
    ) -> Outcome:
        """The client is told when the engine serves the new weights, not before."""
        assert body.sampling_session_seq_id is not None
        call.waiting_for = "the sampler is loading the new weights"
        await self._sampler().load(version)
        session = await self._sampling.create_ephemeral(
            session_id=self._facts.session_id,
            number=body.sampling_session_seq_id,
            kind=body.kind,
            version=version,
        )
        return json_result(type="save_weights_for_sampler", sampling_session_id=session.id)

    async def _save_weights(self, operation: Operation, body: SaveWeights) -> Send:
        facts = self._facts
        path = CheckpointPath(run_id=facts.run_id, kind="weights", name=check_name(body.path))
        await self._check_free(path, overwrite=body.overwrite)
        await self._versions.check_space(
            expected_bytes=3 * facts.version_bytes, what="save a checkpoint"
        )
        folder = checkpoint_folder(self._settings.data_dir, run_id=facts.run_id, name=body.path)

        async def send(call: Call) -> Outcome:
            request = trainer_pb2.SaveCheckpointRequest(
                header=self._header(operation, call), path=str(folder)
            )
            place = place_of_folder(folder)
            self._versions.holds.take(place, owner=facts.run_id)
            try:
                reply = await self._deliver(
                    operation, lambda: self._client.save_checkpoint(request)
                )
                if reply.HasField("failure"):
                    return from_failure(reply.failure)
                await self._put(
                    path,
                    folder=str(folder),
                    step=reply.step,
                    size=reply.bytes,
                    ttl_seconds=body.ttl_seconds,
                    user_metadata=body.user_metadata,
                )
            finally:
                self._versions.holds.give_back(place, owner=facts.run_id)
            return json_result(type="save_weights", path=str(path))

        return send

    async def _load_weights(self, operation: Operation, body: LoadWeights) -> Send:
        facts, holds = self._facts, self._versions.holds
        checkpoint = await self._versions.checkpoints.take_for_training(
            body.path, run_id=facts.run_id
        )
        try:
            await self._check_fits(operation, checkpoint, body)
        except TandemError:
            holds.give_back(checkpoint.place, owner=facts.run_id)
            raise

        async def send(call: Call) -> Outcome:
            request = trainer_pb2.LoadCheckpointRequest(
                header=self._header(operation, call),
                path=checkpoint.folder,
                optimizer=body.optimizer,
            )
            try:
                reply = await self._deliver(
                    operation, lambda: self._client.load_checkpoint(request)
                )
            finally:
                holds.give_back(checkpoint.place, owner=facts.run_id)
            if reply.HasField("failure"):
                return from_failure(reply.failure)
            self._facts.step = reply.step
            return json_result(type="load_weights", path=body.path, model_id=self._facts.run_id)

        return send

    async def _check_fits(
        self, operation: Operation, checkpoint: Checkpoint, body: LoadWeights
    ) -> None:
        """Raises `UnknownModel` or `CheckpointMismatch`."""
        facts, rows = self._facts, self._versions.checkpoints
        if checkpoint.base_model != facts.base_model and operation.seq_id > 0:
            raise UnknownModel(
                f"{body.path!r} is of the base model {checkpoint.base_model!r}, this run of "
                f"{facts.base_model!r}"
            )
        check_compatible(
            path=body.path,
            saved=(await rows.origin(checkpoint.path.run_id)).training,
            here=(await rows.origin(facts.run_id)).training,
            optimizer=body.optimizer,
        )

    async def _deliver(self, operation: Operation, send: Callable[[], Awaitable[Reply]]) -> Reply:
        """Calls the trainer. A broken connection to a living trainer is tried again, since the
        trainer answers what it has applied already from memory; else the run is over."""
        for attempt in range(_REDELIVERIES + 1):
            try:
                reply = await send()
                self._meter.note(operation, reply)
                return reply
            except WorkerUnavailable as error:
                if (fate := await self._fate()) is not None:
                    raise EndsRun(fate) from error
                self._log.warning("redelivering", attempt=attempt, reason=str(error))
            except TandemError as error:
                raise EndsRun(error) from error
        raise EndsRun(InternalError("the connection to the trainer broke again and again"))

    async def _check_free(self, path: CheckpointPath, *, overwrite: bool) -> None:
        if not overwrite and await self._versions.checkpoints.find(path) is not None:
            hint = "; save with overwrite=True to replace it" if path.kind == "weights" else ""
            raise NameTaken(f"there is a checkpoint {path} already{hint}")

    async def _put(
        self,
        path: CheckpointPath,
        *,
        step: int,
        size: int,
        ttl_seconds: int | None,
        user_metadata: Mapping[str, str] | None,
        folder: str = "",
        version: str = "",
    ) -> None:
        now = time.time()
        await self._versions.checkpoints.put(
            Checkpoint(
                path=path,
                base_model=self._facts.base_model,
                folder=folder,
                version=version,
                step=step,
                bytes=size,
                optimizer=bool(folder),
                created_at=now,
                owner=(await self._versions.checkpoints.origin(path.run_id)).owner,
                user_metadata=user_metadata,
                expires_at=now + ttl_seconds if ttl_seconds is not None else None,
            )
        )

    async def _encrypt(
        self, plain: Version, recipients: Sequence[str], *, name: str
    ) -> tuple[Version, int]:
        """A version of its own; the plain one has no name, and goes."""
        sealed = replace(plain, name=name, path=self._versions.path_of(name))
        size = await encrypt_version(
            Path(plain.path), Path(sealed.path), name=name, recipients=recipients
        )
        await self._versions.add_version(sealed, parent=plain.name, size=size)
        return sealed, size

    def _header(self, operation: Operation, call: Call) -> common_pb2.OperationHeader:
        return common_pb2.OperationHeader(
            operation_id=operation.future.request_id,
            session_id=self._facts.session_id,
            run_id=self._facts.run_id,
            # The trainer counts the places of the log from 1, the creation of the run, which
            # may be a load, included; the client counts what comes after it.
            seq_id=operation.seq_id + 1,
            previous_seq_id=call.previous_seq_id + 1 if call.previous_seq_id >= 0 else 0,
            fencing_token=FENCING_TOKEN,
        )


def json_result(**fields: object) -> Result:
    return Result(media="json", body=orjson.dumps(fields))


def check_names(body: Body) -> None:
    """What can be said of a request before its turn. Raises `InvalidRequest`."""
    match body:
        case LoadWeights():
            parse_checkpoint_path(body.path)
        case SaveWeights() | SaveWeightsExternal():
            check_name(body.path)
            check_ttl(body.ttl_seconds)
        case SaveWeightsForSampler() if body.path is not None:
            check_name(body.path)
            check_ttl(body.ttl_seconds)
        case SaveWeightsForSampler() if body.sampling_session_seq_id is None:
            raise InvalidRequest(
                "save_weights_for_sampler needs a path or a sampling_session_seq_id"
            )
        case _:
            pass
