"""What saving and loading do: named and unnamed weight versions, exports, a trainer's state."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from gateway.checkpoints.catalog import Checkpoint, CheckpointCatalog
from gateway.checkpoints.compatibility import check_compatible
from gateway.checkpoints.encryption import check_recipients, encrypt_version
from gateway.checkpoints.versions import VersionStore, WeightVersion
from gateway.futures.table import Outcome
from gateway.identifiers import (
    CheckpointPath,
    check_name,
    new_state_folder,
    relative_state_folder,
    relative_version_folder,
)
from gateway.metrics import Metrics
from gateway.runs.delivery import Delivery, RunProgress, json_result
from gateway.runs.dispatcher import Call, Send
from gateway.runs.operations import (
    LoadWeights,
    Operation,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
)
from gateway.sampling.sessions import SamplingSessionRegistry
from gateway.workers.clients import TrainerClient
from tandem.errors import NameTaken, TandemError, UnknownModel, from_failure
from tandem.telemetry import get_log
from tandem.v1 import common_pb2, trainer_pb2
from tandem.weights import new_version_name


class ServesVersions(Protocol):
    """What a save for sampling needs of a sampler."""

    async def load(self, version: WeightVersion) -> None: ...


class Saves:
    """The saves and loads of one run. Each method does what can fail before the trainer hears
    of the operation, and returns what brings it there."""

    def __init__(
        self,
        *,
        facts: RunProgress,
        client: TrainerClient,
        delivery: Delivery,
        sampler: Callable[[], ServesVersions],
        sampling: SamplingSessionRegistry,
        checkpoints: CheckpointCatalog,
        versions: VersionStore,
        metrics: Metrics,
        data_dir: Path,
    ) -> None:
        self._facts = facts
        self._client = client
        self._delivery = delivery
        self._sampler = sampler
        self._sampling = sampling
        self._checkpoints = checkpoints
        self._versions = versions
        self._metrics = metrics
        self._data_dir = data_dir
        self._log = get_log(session_id=facts.session_id, run_id=facts.run_id)

    async def for_sampler(self, operation: Operation, body: SaveWeightsForSampler) -> Send:
        facts = self._facts
        path = None
        if body.path is not None:
            path = CheckpointPath(
                run_id=facts.run_id, kind="sampler_weights", name=check_name(body.path)
            )
            await self._check_free(path, overwrite=False)
        expected, what = facts.expected_version_bytes, "publish the weights"
        if path is None:
            await self._versions.check_space(expected_bytes=expected, what=what)
        else:
            await self._check_room(expected, what=what)
        name = self._new_name()

        async def send(call: Call) -> Outcome:
            with self._checkpoints.pins.pinned(relative_version_folder(name)):
                version, size = await self._publish(operation, call, name)
                call.release()
                facts.newest = name
                if path is not None:
                    return await self._name_version(path, version, size, body)
                return await self._serve_version(version, call, body)

        return send

    async def _publish(
        self, operation: Operation, call: Call, name: str, *, becomes_parent: bool = True
    ) -> tuple[WeightVersion, int]:
        facts = self._facts
        request = trainer_pb2.PublishRequest(
            header=self._delivery.header(operation, call),
            version=common_pb2.WeightVersion(
                name=name, path=self._versions.path_of(name), run_id=facts.run_id
            ),
            parent=facts.parent,
        )
        reply = await self._delivery.deliver(operation, lambda: self._client.publish(request))
        if reply.HasField("failure"):
            self._log.error("publish_failed", version=name, reason=reply.failure.message)
            raise from_failure(reply.failure)
        version = WeightVersion(
            name=name,
            path=reply.version.path or request.version.path,
            run_id=facts.run_id,
            step=reply.version.step,
            base_model=facts.base_model,
            adapter=reply.version.adapter,
        )
        await self._versions.add_version(version, parent=facts.parent, size=reply.bytes)
        if becomes_parent:
            self._checkpoints.pins.pin(relative_version_folder(name))
            if facts.parent:
                self._checkpoints.pins.unpin(relative_version_folder(facts.parent))
            facts.parent = name
        facts.version_bytes = reply.bytes
        self._metrics.published_bytes.inc(reply.bytes)
        self._log.info(
            "published", version=name, bytes=reply.bytes, seconds=round(reply.seconds, 4)
        )
        return version, reply.bytes

    async def _name_version(
        self, path: CheckpointPath, version: WeightVersion, size: int, body: SaveWeightsForSampler
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

    async def external(self, operation: Operation, body: SaveWeightsExternal) -> Send:
        """Publishes the weights as they are now, for download alone."""
        facts = self._facts
        path = CheckpointPath(
            run_id=facts.run_id, kind="external_weights", name=check_name(body.path)
        )
        await self._check_free(path, overwrite=False)
        recipients = body.age_encryption_recipients or []
        check_recipients(recipients)
        await self._check_room(
            facts.expected_version_bytes * (2 if recipients else 1), what="export the weights"
        )
        plain, sealed = self._new_name(), self._new_name() if recipients else ""

        async def send(call: Call) -> Outcome:
            pins = self._checkpoints.pins
            folders = [relative_version_folder(name) for name in (plain, sealed) if name]
            for folder in folders:
                pins.pin(folder)
            try:
                version, size = await self._publish(
                    operation, call, plain, becomes_parent=not recipients
                )
                call.release()
                if recipients:
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
                for folder in folders:
                    pins.unpin(folder)
                if recipients:  # the plain files are in use until here, and go now
                    self._checkpoints.mark(facts.run_id)
            return json_result(type="save_weights_external", path=str(path), size_bytes=size)

        return send

    def _new_name(self) -> str:
        self._facts.published += 1
        return new_version_name(run_id=self._facts.run_id, number=self._facts.published)

    async def _serve_version(
        self, version: WeightVersion, call: Call, body: SaveWeightsForSampler
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

    async def state(self, operation: Operation, body: SaveWeights) -> Send:
        facts = self._facts
        path = CheckpointPath(run_id=facts.run_id, kind="weights", name=check_name(body.path))
        replaced = await self._check_free(path, overwrite=body.overwrite)
        await self._check_room(
            facts.expected_state_bytes, what="save a checkpoint", replaced=replaced
        )
        folder = new_state_folder(self._data_dir, run_id=facts.run_id, name=body.path)

        async def send(call: Call) -> Outcome:
            request = trainer_pb2.SaveCheckpointRequest(
                header=self._delivery.header(operation, call), path=str(folder)
            )
            relative = relative_state_folder(folder)
            self._checkpoints.pins.pin_for_run(relative, run_id=facts.run_id)
            try:
                reply = await self._delivery.deliver(
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
                self._checkpoints.pins.unpin_for_run(relative, run_id=facts.run_id)
            return json_result(type="save_weights", path=str(path))

        return send

    async def load(self, operation: Operation, body: LoadWeights) -> Send:
        facts, pins = self._facts, self._checkpoints.pins
        checkpoint = await self._checkpoints.pin_for_training(
            body.path, run_id=facts.run_id, readers=body.readers
        )
        try:
            await self._check_fits(operation, checkpoint, body)
        except TandemError:
            pins.unpin_for_run(checkpoint.relative_folder, run_id=facts.run_id)
            raise

        async def send(call: Call) -> Outcome:
            request = trainer_pb2.LoadCheckpointRequest(
                header=self._delivery.header(operation, call),
                path=checkpoint.folder,
                optimizer=body.optimizer,
            )
            try:
                reply = await self._delivery.deliver(
                    operation, lambda: self._client.load_checkpoint(request)
                )
            finally:
                pins.unpin_for_run(checkpoint.relative_folder, run_id=facts.run_id)
            if reply.HasField("failure"):
                return from_failure(reply.failure)
            self._facts.step = reply.step
            return json_result(type="load_weights", path=body.path, model_id=self._facts.run_id)

        return send

    async def _check_fits(
        self, operation: Operation, checkpoint: Checkpoint, body: LoadWeights
    ) -> None:
        """Raises `UnknownModel` or `CheckpointMismatch`."""
        facts = self._facts
        if checkpoint.base_model != facts.base_model and operation.seq_id > 0:
            raise UnknownModel(
                f"{body.path!r} is of the base model {checkpoint.base_model!r}, this run of "
                f"{facts.base_model!r}"
            )
        check_compatible(
            path=body.path,
            saved=(await self._checkpoints.origin(checkpoint.path.run_id)).training,
            here=(await self._checkpoints.origin(facts.run_id)).training,
            optimizer=body.optimizer,
        )

    async def _check_room(
        self, expected: int, *, what: str, replaced: Checkpoint | None = None
    ) -> None:
        """Raises `LimitExceeded` or `StorageFull`."""
        origin = await self._checkpoints.origin(self._facts.run_id)
        await self._checkpoints.check_quota(
            owner=origin.owner,
            expected_bytes=expected,
            replaced_bytes=replaced.bytes if replaced is not None else 0,
        )
        await self._versions.check_space(expected_bytes=expected, what=what)

    async def _check_free(self, path: CheckpointPath, *, overwrite: bool) -> Checkpoint | None:
        """What would be replaced, if anything."""
        found = await self._checkpoints.find(path)
        if not overwrite and found is not None:
            hint = "; save with overwrite=True to replace it" if path.kind == "weights" else ""
            raise NameTaken(f"there is a checkpoint {path} already{hint}")
        return found

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
        await self._checkpoints.put(
            Checkpoint(
                path=path,
                base_model=self._facts.base_model,
                folder=folder,
                version=version,
                step=step,
                bytes=size,
                optimizer=bool(folder),
                created_at=now,
                owner=(await self._checkpoints.origin(path.run_id)).owner,
                user_metadata=user_metadata,
                expires_at=now + ttl_seconds if ttl_seconds is not None else None,
            )
        )

    async def _encrypt(
        self, plain: WeightVersion, recipients: Sequence[str], *, name: str
    ) -> tuple[WeightVersion, int]:
        """A version of its own; the plain one has no name, and goes."""
        sealed = replace(plain, name=name, path=self._versions.path_of(name))
        size = await encrypt_version(
            Path(plain.path), Path(sealed.path), name=name, recipients=recipients
        )
        await self._versions.add_version(sealed, parent=plain.name, size=size)
        return sealed, size
