"""A gRPC client of a real trainer process."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tandem.protocol.worker import TrainingSpec, WorkerSpec
from tandem.settings.workers import TrainerSettings
from tandem.v1 import common_pb2, trainer_pb2, trainer_pb2_grpc
from tandem.weights import version_path
from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.worker_process import (
    CALL_SECONDS,
    RUN,
    SECRET,
    SESSION,
    Started,
    WorkerClient,
    worker_process,
)


def dense(values: object, dtype: str) -> wire.Tensor:
    """Return a dense tensor of type "<f4" or "<i8"."""
    array = np.asarray(values, dtype)
    kind = {"<f4": wire.DTYPE_FLOAT32, "<i8": wire.DTYPE_INT64}[dtype]
    return wire.Tensor(dense=array.tobytes(), dtype=kind, shape=array.shape)


def datum(tokens: Sequence[int], *, targets: object = None, **inputs: object) -> wire.Datum:
    """Without `targets`, each target is the next token, and the last one 3."""
    if targets is None:
        targets = [*tokens[1:], 3]
    made = wire.Datum()
    made.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
    made.loss_fn_inputs["target_tokens"].CopyFrom(dense(targets, "<i8"))
    for name, values in inputs.items():
        made.loss_fn_inputs[name].CopyFrom(dense(values, "<f4"))
    return made


def request(
    data: Sequence[wire.Datum],
    loss: str = "cross_entropy",
    *,
    forward_only: bool = False,
    settings: Mapping[str, float] | None = None,
) -> wire.ForwardBackwardRequest:
    return wire.ForwardBackwardRequest(
        model_id=RUN,
        data=data,
        loss_fn=loss,
        forward_only=forward_only,
        loss_fn_config=settings or {},
    )


def logprobs_of(output: wire.ForwardBackwardOutput) -> list[np.ndarray]:
    """Return the logprobs in the shape of each datum's targets."""
    found = []
    for record in output.loss_fn_outputs:
        field = record.fields["logprobs"]
        offsets = np.frombuffer(field.offsets, "<i8")
        values = np.frombuffer(field.data, "<f4")
        for start, end in zip(offsets // 4, offsets[1:] // 4, strict=False):
            found.append(values[start:end].reshape(-1, *field.trailing_shape))
    return found


class TrainerClient(WorkerClient):
    """Calls of one run, in log order, with the next `seq_id` each time."""

    def __init__(self, started: Started, *, run_id: str = RUN) -> None:
        super().__init__(started)
        self.run_id = run_id
        self.stub = trainer_pb2_grpc.TrainerStub(self.channel)
        self.seq_id = 0

    def header(self, *, incomplete: str = "") -> common_pb2.OperationHeader:
        self.seq_id += 1
        return common_pb2.OperationHeader(
            operation_id=f"op-{self.seq_id}",
            session_id=SESSION,
            run_id=self.run_id,
            seq_id=self.seq_id,
            previous_seq_id=self.seq_id - 1,
            gradients_incomplete=incomplete,
        )

    def of_run(self, run_id: str) -> TrainerClient:
        other = copy.copy(self)
        other.run_id, other.seq_id = run_id, 0
        return other

    def add(self, training: TrainingSpec) -> trainer_pb2.AddRunReply:
        return self.stub.AddRun(
            trainer_pb2.AddRunRequest(run_id=self.run_id, training=training.model_dump_json()),
            metadata=self.metadata,
            timeout=CALL_SECONDS,
        )

    def remove(self) -> None:
        self.stub.RemoveRun(
            trainer_pb2.RemoveRunRequest(run_id=self.run_id),
            metadata=self.metadata,
            timeout=CALL_SECONDS,
        )

    def describe(self) -> trainer_pb2.DescribeTrainerReply:
        return self.stub.Describe(
            trainer_pb2.DescribeTrainerRequest(run_id=self.run_id),
            metadata=self.metadata,
            timeout=CALL_SECONDS,
        )

    def progress(self) -> trainer_pb2.ProgressReply:
        return self.stub.Progress(
            trainer_pb2.ProgressRequest(run_id=self.run_id),
            metadata=self.metadata,
            timeout=CALL_SECONDS,
        )

    def forward_backward(
        self, message: wire.ForwardBackwardRequest | bytes, **fields: int | bytes
    ) -> trainer_pb2.ForwardBackwardReply:
        """`fields` are further ones of the request."""
        payload = message if isinstance(message, bytes) else message.SerializeToString()
        return self.stub.ForwardBackward(
            trainer_pb2.ForwardBackwardRequest(header=self.header(), payload=payload, **fields),
            metadata=self.metadata,
            timeout=CALL_SECONDS,
        )

    def output(self, message: wire.ForwardBackwardRequest) -> wire.ForwardBackwardOutput:
        """Return the output of an operation that must succeed."""
        reply = self.forward_backward(message)
        assert not reply.HasField("failure"), reply.failure
        return wire.ForwardBackwardOutput.FromString(reply.output)

    def optim_step(
        self,
        *,
        lr: float = 1e-3,
        eps: float = 1e-8,
        clip: float = 0.0,
        incomplete: str = "",
        snapshot: str = "",
    ) -> trainer_pb2.OptimStepReply:
        return self.stub.OptimStep(
            trainer_pb2.OptimStepRequest(
                header=self.header(incomplete=incomplete),
                snapshot=snapshot,
                adamw=trainer_pb2.AdamWParams(
                    learning_rate=lr, beta1=0.9, beta2=0.95, eps=eps, grad_clip_norm=clip
                ),
            ),
            metadata=self.metadata,
            timeout=CALL_SECONDS,
        )

    def await_snapshot(self, path: str) -> trainer_pb2.AwaitSnapshotReply:
        return self.stub.AwaitSnapshot(
            trainer_pb2.AwaitSnapshotRequest(path=path, run_id=self.run_id),
            metadata=self.metadata,
            timeout=CALL_SECONDS,
        )

    def take_snapshot(self, path: str) -> trainer_pb2.AwaitSnapshotReply:
        return self.stub.TakeSnapshot(
            trainer_pb2.TakeSnapshotRequest(path=path, run_id=self.run_id),
            metadata=self.metadata,
            timeout=CALL_SECONDS,
        )

    def restore(self, path: str, *, seq_id: int) -> trainer_pb2.RestoreReply:
        """Continue after the operation `seq_id`."""
        self.seq_id = seq_id
        return self.stub.Restore(
            trainer_pb2.RestoreRequest(path=path, seq_id=seq_id, run_id=self.run_id),
            metadata=self.metadata,
            timeout=CALL_SECONDS,
        )

    def sleep(self, **fields: Any) -> common_pb2.SwitchReply:
        """`fields` are those of the request."""
        return self.stub.Sleep(
            common_pb2.SleepRequest(**fields), metadata=self.metadata, timeout=CALL_SECONDS
        )

    def wake(self) -> common_pb2.SwitchReply:
        return self.stub.Wake(
            common_pb2.WakeRequest(), metadata=self.metadata, timeout=CALL_SECONDS
        )

    def publish(
        self,
        data_dir: Path,
        number: int = 1,
        *,
        handoff: bool = False,
        early: bool = False,
    ) -> tuple[trainer_pb2.PublishReply, Path]:
        name = f"{self.run_id}/v{number:06d}-{os.urandom(4).hex()}"
        path = version_path(data_dir, name)
        reply = self.stub.Publish(
            trainer_pb2.PublishRequest(
                header=self.header(),
                version=common_pb2.WeightVersion(name=name, path=str(path), run_id=self.run_id),
                handoff=handoff,
                early=early,
            ),
            metadata=self.metadata,
            timeout=CALL_SECONDS,
        )
        return reply, path

    def await_published(self, version: common_pb2.WeightVersion) -> trainer_pb2.PublishReply:
        """Return an early version's reply once it is durable or gone."""
        header = common_pb2.OperationHeader(run_id=self.run_id)
        return self.stub.AwaitPublished(
            trainer_pb2.PublishRequest(header=header, version=version),
            metadata=self.metadata,
            timeout=CALL_SECONDS,
        )

    def release(self, version: common_pb2.WeightVersion) -> None:
        """Free memory that was kept for a sampler."""
        self.stub.Release(
            trainer_pb2.ReleaseRequest(run_id=self.run_id, name=version.name),
            metadata=self.metadata,
            timeout=CALL_SECONDS,
        )

    def save(self, path: Path) -> trainer_pb2.SaveCheckpointReply:
        return self.stub.SaveCheckpoint(
            trainer_pb2.SaveCheckpointRequest(header=self.header(), path=str(path)),
            metadata=self.metadata,
            timeout=CALL_SECONDS,
        )

    def load(self, path: Path, *, optimizer: bool) -> trainer_pb2.LoadCheckpointReply:
        return self.stub.LoadCheckpoint(
            trainer_pb2.LoadCheckpointRequest(
                header=self.header(), path=str(path), optimizer=optimizer
            ),
            metadata=self.metadata,
            timeout=CALL_SECONDS,
        )


@contextmanager
def trainer_process(
    model: Path,
    data_dir: Path,
    *,
    wait: bool = True,
    training: TrainingSpec | None = None,
    devices: Sequence[str] = (),
    lease: int = 0,
    **settings: Any,
) -> Iterator[TrainerClient]:
    """`settings` are those of `TrainerSettings`."""
    spec = WorkerSpec(
        worker_id="trainer-test",
        kind="trainer",
        secret=SECRET,
        model_name="tiny",
        model_path=str(model),
        session_id=SESSION,
        run_id=RUN,
        training=training,
        devices=tuple(devices),
        lease=lease,
        trainer=TrainerSettings(**{"device": "cpu", "threads": 1, **settings}),
    )
    with worker_process(spec) as started, TrainerClient(started) as client:
        if lease:
            client.hold(lease)
        if wait:
            client.wait_until_serving()
        yield client
