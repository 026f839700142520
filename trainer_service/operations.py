"""What each operation does on rank 0, called in the engine thread; answers with replies.

User mistakes are found before the other ranks hear of an operation, so that a refused one
leaves no trace but that the held gradients no longer are what the client meant.
"""

from __future__ import annotations

import time
from pathlib import Path

from tandem.errors import GradientsIncomplete, NoGradients, TandemError, UserError
from tandem.v1 import common_pb2, trainer_pb2
from trainer_service import checkpoint
from trainer_service import publish as publishing
from trainer_service.batch import parse
from trainer_service.control import Op
from trainer_service.losses import LOSSES, losses_for
from trainer_service.optimizers import step_settings
from trainer_service.output import encode_output
from trainer_service.rank_trainer import RankTrainer, version_request
from trainer_service.validate import Limits, validate


class Operations:
    """Knows whether gradients are held, and whether they are whole."""

    def __init__(self, trainer: RankTrainer) -> None:
        self._trainer = trainer
        self.ranks = trainer.control.size
        self._held = False
        self._refused = ""

    def beat(self) -> None:
        """Between operations, while idle."""
        self._trainer.control.beat()

    def describe(self, *, last_seq_id: int) -> trainer_pb2.DescribeTrainerReply:
        trainer = self._trainer
        facts = trainer.backend.facts
        return trainer_pb2.DescribeTrainerReply(
            architecture=facts.architecture,
            parameters=facts.parameters,
            vocabulary=facts.vocabulary,
            max_length=facts.max_length,
            ranks=trainer.control.size,
            dtype=trainer.backend.dtype,
            device=trainer.backend.device,
            last_seq_id=last_seq_id,
            step=trainer.step,
            trainable_parameters=facts.trainable_parameters,
        )

    def forward_backward(
        self, request: trainer_pb2.ForwardBackwardRequest
    ) -> trainer_pb2.ForwardBackwardReply:
        trainer, began = self._trainer, time.perf_counter()
        facts = trainer.backend.facts
        forward_only = False
        try:
            message = parse(request.payload)
            forward_only = message.forward_only
            limits = Limits(vocabulary=facts.vocabulary, max_length=facts.max_length)
            losses = losses_for(registry=LOSSES, definition=request.loss_definition)
            batch = validate(message, losses=losses, limits=limits)
        except UserError as error:
            if not forward_only:
                self._refused = error.message
            return trainer_pb2.ForwardBackwardReply(failure=error.to_failure())
        trainer.control.broadcast(Op.FORWARD_BACKWARD, request.SerializeToString())
        self._held = self._held or not forward_only
        try:
            computed = trainer.forward_backward(batch)
        except UserError as error:  # a custom loss that failed on its datums
            if not forward_only:
                self._refused = error.message
            return trainer_pb2.ForwardBackwardReply(failure=error.to_failure())
        assert computed is not None
        return trainer_pb2.ForwardBackwardReply(
            output=encode_output(batch, logprobs=computed.logprobs, metrics=computed.metrics),
            seconds=time.perf_counter() - began,
            tokens=len(batch.tokens),
        )

    def optim_step(self, request: trainer_pb2.OptimStepRequest) -> trainer_pb2.OptimStepReply:
        trainer, began = self._trainer, time.perf_counter()
        try:
            settings = step_settings(request, optimizer=trainer.backend.training.optimizer)
            refused = request.gradients_incomplete or self._refused
            if refused:
                self._drop()
                raise GradientsIncomplete(
                    "a forward_backward since the last step was refused, so the step was not "
                    f"made and the gradients were dropped: {refused}"
                )
            if not self._held:
                raise NoGradients(
                    "there are no gradients: no forward_backward came since the last optim_step"
                )
            trainer.control.broadcast(Op.OPTIM_STEP, request.SerializeToString())
            self._held = False
            metrics = trainer.optim_step(settings)
        except TandemError as error:
            return trainer_pb2.OptimStepReply(failure=error.to_failure(), step=trainer.step)
        return trainer_pb2.OptimStepReply(
            metrics=metrics, step=trainer.step, seconds=time.perf_counter() - began
        )

    def publish(self, request: trainer_pb2.PublishRequest) -> trainer_pb2.PublishReply:
        trainer, began = self._trainer, time.perf_counter()
        try:
            publishing.prepare(version_request(request, step=trainer.step), trainer.backend)
            trainer.control.broadcast(Op.PUBLISH, request.SerializeToString())
            manifest = trainer.publish(request)
        except TandemError as error:
            return trainer_pb2.PublishReply(failure=error.to_failure())
        assert manifest is not None
        version = common_pb2.WeightVersion(
            name=manifest.version,
            path=request.version.path,
            run_id=manifest.run_id,
            step=manifest.step,
            adapter=manifest.adapter,
        )
        return trainer_pb2.PublishReply(
            version=version, bytes=manifest.bytes, seconds=time.perf_counter() - began
        )

    def save_checkpoint(
        self, request: trainer_pb2.SaveCheckpointRequest
    ) -> trainer_pb2.SaveCheckpointReply:
        trainer, began = self._trainer, time.perf_counter()
        try:
            checkpoint.prepare_save(Path(request.path), trainer.backend)
            trainer.control.broadcast(Op.SAVE_CHECKPOINT, request.SerializeToString())
            record = trainer.save(request)
        except TandemError as error:
            return trainer_pb2.SaveCheckpointReply(failure=error.to_failure())
        assert record is not None
        return trainer_pb2.SaveCheckpointReply(
            step=record.step, bytes=record.bytes, seconds=time.perf_counter() - began
        )

    def load_checkpoint(
        self, request: trainer_pb2.LoadCheckpointRequest
    ) -> trainer_pb2.LoadCheckpointReply:
        trainer, began = self._trainer, time.perf_counter()
        try:
            checkpoint.check(
                Path(request.path),
                optimizer=request.optimizer,
                backend=trainer.backend,
                control=trainer.control,
                base=trainer.base,
            )
        except TandemError as error:
            return trainer_pb2.LoadCheckpointReply(failure=error.to_failure(), step=trainer.step)
        trainer.control.broadcast(Op.LOAD_CHECKPOINT, request.SerializeToString())
        trainer.load(request)
        self._held, self._refused = False, ""
        return trainer_pb2.LoadCheckpointReply(
            step=trainer.step, seconds=time.perf_counter() - began
        )

    def _drop(self) -> None:
        self._trainer.control.broadcast(Op.DROP_GRADIENTS)
        self._trainer.drop_gradients()
        self._held, self._refused = False, ""
