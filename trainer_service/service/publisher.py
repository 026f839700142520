"""Publishes the versions of a run, on rank 0.

An early publish is answered once others can read the version, in files or from a copy in memory. A
thread then syncs its files, or writes them from the copy. The gateway counts no later answer until
then, so a trainer that dies meanwhile publishes the same bits again."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path

from tandem.errors import PublishFailed, ServerError, TandemError, describe
from tandem.telemetry import get_log
from tandem.v1 import common_pb2, trainer_pb2
from tandem.weights import Manifest
from trainer_service.checkpoints.handoff import KeptCopy, free_unused, keep_copy
from trainer_service.checkpoints.publish import hand_over, publish
from trainer_service.checkpoints.storage import begin, storage_error
from trainer_service.checkpoints.version_requests import (
    Published,
    VersionRequest,
    prepare_publish,
    published_by,
)
from trainer_service.compute.trainer import RankTrainer
from trainer_service.service.sequence import KEPT_RESULTS

_WRITTEN_WITHIN = 60.0
"""Seconds of a sleep until the files are written. The gateway asks again."""


class Publisher:
    """`newest` is the name of the run's newest version."""

    def __init__(self, trainer: RankTrainer) -> None:
        self._trainer = trainer
        self.newest = ""
        self._early: dict[str, Future[trainer_pb2.PublishReply]] = {}
        """The replies of the newest early versions, once they are durable, by name."""
        self._writing: dict[Future[trainer_pb2.PublishReply], int] = {}
        """The bytes of each copy that a thread writes to files, by its version's reply."""
        self._copies: dict[str, KeptCopy] = {}
        """Copies for a sampler: of the newest version until its release, and of older versions
        never released."""
        self._releasing = threading.Lock()

    def publish(
        self, request: trainer_pb2.PublishRequest, *, announce: Callable[[], None]
    ) -> trainer_pb2.PublishReply:
        """Publish a version. `announce` it to the other ranks first. Only in the engine thread."""
        trainer, began = self._trainer, time.perf_counter()
        version = VersionRequest.from_message(request, step=trainer.step)
        copy: KeptCopy | None = None
        offered: common_pb2.Handoff | None = None
        self.release()
        try:
            published = published_by(version)
            if published is None:
                prepare_publish(version, trainer.backend)
                whole = trainer.backend.training.lora is None
                if request.handoff and whole and trainer.control.size == 1:
                    copy = keep_copy(version.name, trainer.backend, held=self._held())
                if copy is not None and request.early:
                    published = hand_over(version, trainer, copy)
                    if (offered := self._offer(copy, published)) is None:
                        published = None
                    copy = None
                if offered is None:
                    announce()
                    published = publish(version, trainer, copy, early=request.early)
        except TandemError as error:
            if copy is not None:
                copy.close()
            return trainer_pb2.PublishReply(failure=error.to_failure())
        assert published is not None
        if copy is not None:
            offered = self._offer(copy, published)
        before, self.newest = self.newest, version.name
        reply = _reply(published, version.path, seconds=time.perf_counter() - began)
        if published.make_durable is not None:
            self._complete(published.make_durable, reply, before=before)
            if not published.manifest.files and offered is not None:
                reply.bytes = offered.bytes
                self._writing[self._early[version.name]] = offered.bytes
        if offered is not None:
            reply.handoff.CopyFrom(offered)
        return reply

    def _held(self) -> int:
        """Return the bytes of copies that a reader or a writer of files may still need."""
        writing = {each: size for each, size in self._writing.items() if not each.done()}
        self._writing = writing
        return sum(each.bytes for each in list(self._copies.values())) + sum(writing.values())

    def _complete(
        self, make_durable: Callable[[], Manifest], reply: trainer_pb2.PublishReply, *, before: str
    ) -> None:
        name, durable = reply.version.name, trainer_pb2.PublishReply()
        durable.CopyFrom(reply)
        durable.durable = True

        def complete() -> trainer_pb2.PublishReply:
            try:
                durable.bytes = make_durable().bytes
                return durable
            except OSError as error:
                failed: ServerError = storage_error(error, what=name, needed=reply.bytes)
            except Exception as error:  # noqa: BLE001 (a library's, such as CUDA's)
                get_log().exception("version_not_durable", version=name)
                failed = PublishFailed(f"{name} could not be written: {describe(error)}; try again")
            if self.newest == name:
                self.newest = before
            self.release()
            gc.collect()  # an error and its thread keep each other, and parts of a copy
            free_unused(self._trainer.backend.device)
            return trainer_pb2.PublishReply(failure=failed.to_failure())

        self._early[name] = begin(complete)
        for old in list(self._early)[:-KEPT_RESULTS]:
            del self._early[old]

    def await_published(
        self, request: trainer_pb2.PublishRequest
    ) -> Future[trainer_pb2.PublishReply]:
        """Return an early version's reply, once it is durable or has failed. From any thread."""
        if (durable := self._early.get(request.version.name)) is not None:
            return durable
        unknown: Future[trainer_pb2.PublishReply] = Future()
        error = PublishFailed(f"this trainer has not published {request.version.name} early")
        unknown.set_result(trainer_pb2.PublishReply(failure=error.to_failure()))
        return unknown

    def _offer(self, copy: KeptCopy, published: Published) -> common_pb2.Handoff | None:
        self._copies[copy.name] = copy
        offered = copy.offer(published.manifest, on_deadline=lambda: self.release(copy.name))
        if offered is None:
            self.release(copy.name)
        return offered

    def end_writing(self) -> bool:
        """Wait until no files are written from copies on the device. Return whether that ended."""
        if self._trainer.backend.device == "cpu":  # such copies are no part of a trainer's state
            return True
        return not wait_for(self._writing, timeout=_WRITTEN_WITHIN).not_done

    def release(self, name: str = "") -> None:
        """Free the copy of a version after its reader has loaded it, from any thread.

        Without a name, free the copies that their readers keep alive by themselves."""
        with self._releasing:
            for copy in list(self._copies.values()):
                if copy.name == name or (not name and copy.outlives_close):
                    self._copies.pop(copy.name).close()


def _reply(published: Published, path: Path, *, seconds: float) -> trainer_pb2.PublishReply:
    manifest = published.manifest
    return trainer_pb2.PublishReply(
        version=common_pb2.WeightVersion(
            name=manifest.version,
            path=str(path),
            run_id=manifest.run_id,
            step=manifest.step,
            adapter=manifest.adapter,
        ),
        bytes=manifest.bytes,
        seconds=seconds,
        durable=published.make_durable is None,
    )
