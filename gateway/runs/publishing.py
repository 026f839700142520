"""Publishes a run's weight versions, and lets its engines load them.

A version without a name is loaded before its files are durable (docs/design/models.md, "Early
versions")."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from gateway.checkpoints.versions import WeightVersion
from gateway.identifiers import relative_version_folder, sampling_session_id_of
from gateway.runs.delivery import CallDelivery
from gateway.runs.early_engines import sampler_of
from gateway.runs.operations import Call, SaveWeightsForSampler, json_result
from gateway.runs.tools import RunTools
from gateway.runs.trainer import RunTrainer
from gateway.sampling.sampler import Sampler
from gateway.storage.futures.table import Result
from gateway.workers.clients import WorkerUnavailable
from gateway.workers.model_sizes import read_ahead
from tandem.errors import PublishFailed, SequenceGap, TandemError, describe
from tandem.telemetry import get_log
from tandem.v1 import common_pb2, trainer_pb2
from tandem.weights import Manifest, open_version


@dataclass(frozen=True)
class _Written:
    """A version that the trainer has written in `seconds`, in files or for its `handoff`.

    `until_durable` waits until its files survive a power failure, and returns the trainer's reply.
    None: an earlier gateway has recorded it."""

    version: WeightVersion
    until_durable: Callable[[], Awaitable[trainer_pb2.PublishReply]] | None = None
    handoff: common_pb2.Handoff | None = None
    seconds: float = 0.0


class RunPublisher:
    def __init__(self, *, trainer: RunTrainer, tools: RunTools, delivery: CallDelivery) -> None:
        self._run = trainer.run
        self._trainer = trainer
        self._tools = tools
        self._delivery = delivery
        self._versions = tools.versions
        self._pins = tools.checkpoints.pins
        self._log = get_log(session_id=trainer.run.session_id, run_id=trainer.run.id)

    async def serve(self, call: Call, body: SaveWeightsForSampler) -> Result:
        """Publish a version without a name. It ends when the engine serves the new weights."""
        run, what, number = self._run, "publish the weights", body.sampling_session_seq_id
        assert number is not None, "a version without a name is for a sampling session"
        await self._versions.check_space(expected_bytes=run.expected_version_bytes, what=what)
        await read_ahead(run.model.path, self._tools.settings)
        # Engines start while the trainer publishes.
        sampler = sampler_of(run, self._tools)
        sampler.start()
        with self.writing(name := call.operation.version):
            in_flight = body.kind == "inflight"
            written = await self._write(call, name, to=sampler, early=not in_flight)
            call.explain = lambda: (
                "the sampler is loading the new weights" if sampler.serves else sampler.explain()
            )
            call.is_paused = lambda: not sampler.serves
            run.timeline.engines.update(engine.key for engine in sampler.engines)
            session = sampling_session_id_of(session_id=run.session_id, number=number)
            with self._tools.sampling.opening(session, name):
                try:  # the files are synced while the engine loads them
                    async with asyncio.TaskGroup() as both:
                        durable = both.create_task(self._complete(call, written, sampled=True))
                        opening = both.create_task(
                            self._open_session(call, body.kind, number, sampler, written, durable)
                        )
                except ExceptionGroup as failed:  # if files are lost, nobody loads them
                    raise failed.exceptions[0] from None
                if (error := opening.result()) is not None:
                    raise error
                await self._tools.sampling.record(session, durable.result())
        return _session_result(session)

    async def _open_session(
        self,
        call: Call,
        kind: Literal["snapshot", "inflight"],
        number: int,
        sampler: Sampler,
        written: _Written,
        durable: asyncio.Task[WeightVersion],
    ) -> TandemError | None:
        """Load a version and open its sampling session. Returns an error of these, if any.

        The client gets the result then, before the files are durable, if another gateway or trainer
        can publish the same bits again. The journal gets it afterwards."""
        in_flight = kind == "inflight"
        if handed_over := written.handoff is not None and not in_flight:
            sampler.await_files(written.version.name, durable)
        error = await self._load_into(sampler, call, written, in_flight=in_flight)
        if error is not None and handed_over:
            await asyncio.wait({durable})  # now there are files
            again = replace(written, handoff=None)
            error = await self._load_into(sampler, call, again, in_flight=False)
        if error is not None:
            return error
        run = self._run
        try:
            session = await self._tools.sampling.open_ephemeral(
                session_id=run.session_id, number=number, kind=kind, version=written.version
            )
        except TandemError as refused:  # the version is completed all the same
            return refused
        repeats = run.log is not None and run.log.complete
        if repeats and run.error is None and not in_flight:
            run.timeline.end_operation(call.operation.future)
            call.operation.future.resolve_early(_session_result(session.id))
        return None

    async def _load_into(
        self, sampler: Sampler, call: Call, written: _Written, *, in_flight: bool
    ) -> TandemError | None:
        """Load a version into a sampler. Returns the error, if any, because the version stays."""
        version, handoff, failed = written.version, written.handoff, None
        try:
            with self._run.timeline.during("load"):
                await sampler.load(version, in_flight=in_flight, handoff=handoff)
        except TandemError as error:
            failed = error
        # Not after a cancellation: the engine may still read, so the trainer frees it later.
        if handoff is not None:
            await self._release_handoff(version.name)
        call.explain, call.waiting_for = None, "the disk is taking the new weights"
        return failed

    def writing(self, version: str) -> AbstractContextManager[None]:
        return self._tools.checkpoints.writing(
            relative_version_folder(version), run_id=self._run.id
        )

    async def publish(
        self, call: Call, name: str, *, sampled: bool = False, becomes_parent: bool = True
    ) -> WeightVersion:
        """Publish and return a weight version, which may be `sampled`."""
        written = await self._write(call, name)
        return await self._complete(call, written, sampled=sampled, becomes_parent=becomes_parent)

    async def _write(
        self, call: Call, name: str, *, to: Sampler | None = None, early: bool = False
    ) -> _Written:
        """Let the trainer write a version. `_complete` must follow. An `early` one may not be
        durable yet.

        If the trainer can hand the weights over `to` a sampler, the handoff is valid until
        `_release_handoff`."""
        run, path = self._run, self._versions.path_of(name)
        if call.operation.resumed:
            if (published := await self._versions.find(name)) is not None:
                return _Written(published)
            if call.released:  # it came after a gap that was given up
                raise SequenceGap(f"operation {call.operation.seq_id} was not carried out")
        request = trainer_pb2.PublishRequest(
            version=common_pb2.WeightVersion(name=name, path=path, run_id=run.id),
            parent=run.parent,
            handoff=to is not None and self._hands_over(to),
            early=early,
        )
        reply = await self._delivery.deliver(call, lambda client: client.stub.Publish, request)
        version = WeightVersion(
            name=name,
            path=path,
            run_id=run.id,
            step=reply.version.step,
            base_model=run.model.name,
            adapter=reply.version.adapter,
            parent=run.parent,
            bytes=reply.bytes,
        )
        run.timeline.note_published(name, step=version.step)
        return _Written(
            version,
            partial(self._delivery.until_durable, call, request, reply),
            reply.handoff if reply.HasField("handoff") else None,
            reply.seconds,
        )

    async def _complete(
        self, call: Call, written: _Written, *, sampled: bool, becomes_parent: bool = True
    ) -> WeightVersion:
        """Wait until a version is durable, record it, and return it. Later operations end after
        that."""
        run, version, name = self._run, written.version, written.version.name
        if written.until_durable is None:
            return version
        reply = await written.until_durable()
        if written.handoff is not None and written.handoff.manifest:
            await asyncio.to_thread(_check_files, version, written.handoff.manifest)
        version = replace(version, bytes=reply.bytes)
        facts = {"parent": name} if becomes_parent else {}
        facts |= {"newest": name} if sampled else {}
        await self._versions.add_version(version, facts=facts)
        if becomes_parent:
            self._pins.pin(relative_version_folder(name))
            if run.parent:
                self._pins.unpin(relative_version_folder(run.parent))
            run.parent = name
        if sampled:
            run.newest = name
        run.published = version
        self._tools.metrics.published_bytes.inc(version.bytes)
        self._log.info(
            "published", version=name, bytes=version.bytes, seconds=round(written.seconds, 4)
        )
        call.release()
        return version

    def _hands_over(self, sampler: Sampler) -> bool:
        run, wanted = self._run, self._tools.settings.weights_handoff
        if run.training.lora is not None or wanted == "off":
            return False
        if wanted == "auto" and run.about.device != "cuda":
            return False
        engines = sampler.engines
        if len(engines) != 1 or not engines[0].takes_handoffs:
            return False
        return engines[0].is_beside(run.host.key)

    async def _release_handoff(self, version: str) -> None:
        """Let the trainer free the weights of a handoff. Otherwise it frees them after a while."""
        if self._trainer.serves:
            try:
                await self._trainer.serving.release(version)
            except (WorkerUnavailable, TandemError) as error:
                self._log.warning("handoff_not_released", version=version, reason=describe(error))


def _check_files(version: WeightVersion, handed_over: bytes) -> None:
    """Raise `PublishFailed` if a version's files have other numbers than the engine got: those of a
    trainer that died, whose replacement may compute other bits on a GPU."""
    sums = Manifest.model_validate_json(handed_over).sums
    if open_version(Path(version.path), checksums=False).sums != sums:
        raise PublishFailed(
            f"the trainer died before it wrote {version.name}, and its replacement computed other "
            "numbers; publish the weights again"
        )


def _session_result(sampling_session_id: str) -> Result:
    return json_result(type="save_weights_for_sampler", sampling_session_id=sampling_session_id)
