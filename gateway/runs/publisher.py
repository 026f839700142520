"""Publishes a run's weight versions through its trainer. Each is the parent of the next."""

from __future__ import annotations

from gateway.checkpoints.versions import WeightVersion
from gateway.identifiers import relative_version_folder
from gateway.runs.delivery import CallDelivery
from gateway.runs.deltas import Published
from gateway.runs.operations import Call
from gateway.runs.tools import RunTools
from gateway.runs.trainer import RunTrainer
from gateway.sampling.sampler import Sampler
from gateway.workers.clients import WorkerUnavailable
from tandem.errors import SequenceGap, TandemError, describe
from tandem.telemetry import get_log
from tandem.v1 import common_pb2, trainer_pb2


class WeightPublisher:
    def __init__(self, *, trainer: RunTrainer, delivery: CallDelivery, tools: RunTools) -> None:
        self._run = run = trainer.run
        self._trainer = trainer
        self._delivery = delivery
        self._versions = tools.versions
        self._pins = tools.checkpoints.pins
        self._metrics = tools.metrics
        self._handoff = tools.settings.weights_handoff
        self._log = get_log(session_id=run.session_id, run_id=run.id)

    async def publish(
        self,
        call: Call,
        name: str,
        *,
        sampled: bool = False,
        becomes_parent: bool = True,
        delta: bool = False,
        to: Sampler | None = None,
    ) -> tuple[WeightVersion, common_pb2.Handoff | None]:
        """Publish and return a weight version, which may be `sampled` or a `delta`. Named versions
        are whole, because their files are copied. If the trainer can hand the weights over `to` a
        sampler, also return the handoff, valid until `release`."""
        run, path = self._run, self._versions.path_of(name)
        if call.operation.resumed:
            if (published := await self._versions.find(name)) is not None:
                return published, None
            if call.released:  # it came after a gap that was given up
                raise SequenceGap(f"operation {call.operation.seq_id} was not carried out")
        request = trainer_pb2.PublishRequest(
            version=common_pb2.WeightVersion(name=name, path=path, run_id=run.id),
            parent=run.parent,
            # The base is pinned: `run.parent` is the base or a delta of it.
            delta_of=run.deltas.next() if delta else "",
            handoff=to is not None and self._hands_over(to),
        )
        try:
            reply = await self._delivery.deliver(call, lambda client: client.stub.Publish, request)
        except TandemError:
            run.deltas.forget()
            raise
        written = Published(name, reply.bytes, reply.written_bytes, reply.delta_of)
        version = WeightVersion(
            name=name,
            path=path,
            run_id=run.id,
            step=reply.version.step,
            base_model=run.model.name,
            adapter=reply.version.adapter,
            parent=run.parent,
            bytes=reply.bytes,
            delta_of=reply.delta_of,
        )
        facts = {"parent": name} if becomes_parent else {}
        facts |= {"newest": name} if sampled else {}
        await self._versions.add_version(version, facts=facts)
        if becomes_parent:
            self._pins.pin(relative_version_folder(name))
            if run.parent:
                self._pins.unpin(relative_version_folder(run.parent))
            run.parent = name
            run.deltas.note_published(written)
        if sampled:
            run.newest = name
        run.published = written
        self._metrics.published_bytes.inc(reply.written_bytes)
        self._log.info(
            "published",
            version=name,
            bytes=reply.bytes,
            written_bytes=reply.written_bytes,
            delta_of=reply.delta_of,
            seconds=round(reply.seconds, 4),
        )
        call.release()
        return version, reply.handoff if reply.HasField("handoff") else None

    def _hands_over(self, sampler: Sampler) -> bool:
        run, wanted = self._run, self._handoff
        if run.training.lora is not None or wanted == "off":
            return False
        if wanted == "auto" and run.about.device != "cuda":
            return False
        engines = sampler.engines
        return len(engines) == 1 and engines[0].is_beside(run.host.key)

    async def release(self, version: str) -> None:
        """Let the trainer free the weights of a handoff. Otherwise it frees them after a while."""
        if self._trainer.serves:
            try:
                await self._trainer.serving.release(version)
            except (WorkerUnavailable, TandemError) as error:
                self._log.warning("handoff_not_released", version=version, reason=describe(error))
