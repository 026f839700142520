"""The runs that a trainer hosts: one, or several LoRA runs of one base model.

Each run has its own `Operations` and a number, which rank 0 announces with each operation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from tandem.errors import InvalidRequest, OutOfMemory, UserError, describe
from tandem.protocol.worker import TrainingSpec
from tandem.v1 import trainer_pb2
from trainer_service.batches.memory import ran_out_of_memory
from trainer_service.checkpoints.snapshots import snapshot_thread
from trainer_service.compute.control_group import ControlGroup, Op
from trainer_service.compute.device_memory import memory_of
from trainer_service.compute.trainer import RankTrainer
from trainer_service.service import joint_calls
from trainer_service.service.batch_call import BatchCall
from trainer_service.service.operations import Follower, Operations
from trainer_service.service.switching import Switching


class HostedRuns:
    def __init__(self, first: RankTrainer, *, run_id: str) -> None:
        self._control = first.control
        self._thread = snapshot_thread()
        self.switching = _switching(self._control, lambda: self._runs.values())
        self._runs = {run_id: self._operations(first)}
        self._numbers = itertools.count(1)

    def _operations(self, trainer: RankTrainer) -> Operations:
        return Operations(trainer, thread=self._thread, switching=self.switching)

    @property
    def ranks(self) -> int:
        return self._control.size

    def heartbeat(self) -> None:
        self._control.heartbeat()

    def operations_of(self, run_id: str) -> Operations:
        """Return a run's operations, from any thread. Use `take_turn` to call them."""
        return self._runs[run_id]

    def take_turn(self, run_id: str) -> Operations:
        """Activate a run's adapters, and return the run's operations."""
        operations = self._runs[run_id]
        operations.trainer.backend.activate()
        return operations

    def compute_together(self, waiting: Sequence[tuple[str, BatchCall | None]]) -> list[int]:
        """Compute the first of the waiting jobs' batches together with others. See there."""
        return joint_calls.compute_together(waiting, self.operations_of)

    def release_copies(self) -> bool:
        """Free copies of weights, before a sleep or a wake. Return False if a version's files are
        still being written from one on the device."""
        for run in self._runs.values():
            run.publisher.release()
        return all(run.publisher.end_writing() for run in self._runs.values())

    def describe_run(self, run_id: str) -> trainer_pb2.DescribeTrainerReply:
        about = self._runs[run_id].describe()
        about.run_ids.extend(self._runs)
        return about

    def add_run(self, request: trainer_pb2.AddRunRequest) -> trainer_pb2.AddRunReply:
        """Refusals are in the reply, so that other runs continue."""
        training = TrainingSpec.model_validate_json(request.training)
        try:
            if request.run_id not in self._runs:
                self._add(request, training)
            elif self._runs[request.run_id].trainer.backend.training != training:
                raise InvalidRequest(
                    f"the trainer hosts {request.run_id} already, with other adapters"
                )
        except (UserError, OutOfMemory) as error:
            return trainer_pb2.AddRunReply(failure=error.to_failure())
        return trainer_pb2.AddRunReply(about=self.describe_run(request.run_id))

    def _add(self, request: trainer_pb2.AddRunRequest, training: TrainingSpec) -> None:
        sibling = next(iter(self._runs.values())).trainer
        made = _share(sibling, training, number=next(self._numbers))  # it may refuse
        made.control.broadcast(Op.ADD_RUN, request)
        for reason in made.control.gather(b""):
            if reason:
                made.control.broadcast(Op.REMOVE_RUN)
                raise OutOfMemory(reason.decode())
        self._runs[request.run_id] = self._operations(made)

    def remove_run(self, run_id: str) -> None:
        """Free a run's memory, if there is such a run."""
        if (removed := self._runs.pop(run_id, None)) is None:
            return
        removed.trainer.control.broadcast(Op.REMOVE_RUN)
        del removed
        _free(next(iter(self._runs.values())).trainer)


class FollowedRuns:
    def __init__(self, first: RankTrainer) -> None:
        self._control = first.control
        self._thread = snapshot_thread()
        self._switching = _switching(self._control, lambda: self._runs.values())
        self._runs = {0: Follower(first, thread=self._thread)}

    def follow(self) -> NoReturn:
        """Apply rank 0's announcements until the process is killed."""
        while True:
            op, number, payload = self._control.receive()
            if op == Op.ADD_RUN:
                self._add(number, trainer_pb2.AddRunRequest.FromString(payload))
            elif op == Op.REMOVE_RUN:
                self._runs.pop(number, None)
                _free(next(iter(self._runs.values())).trainer)
            elif op in (Op.SLEEP, Op.WAKE):
                self._switching.follow(op, payload)
            elif op != Op.HEARTBEAT:
                run = self._runs[number]
                run.trainer.backend.activate()
                run.apply(op, payload)

    def _add(self, number: int, request: trainer_pb2.AddRunRequest) -> None:
        """Add a run that rank 0 has checked. Only memory can be missing."""
        sibling = next(iter(self._runs.values())).trainer
        training = TrainingSpec.model_validate_json(request.training)
        reason = ""
        try:
            made = _share(sibling, training, number=number)
            self._runs[number] = Follower(made, thread=self._thread)
        except OutOfMemory as error:
            reason = f"rank {self._control.rank}: {error.message}"
        self._control.gather(reason.encode())


def _switching(
    control: ControlGroup, runs: Callable[[], Iterable[Operations | Follower]]
) -> Switching:
    def free_copies() -> None:
        for run in runs():
            run.snapshots.free()

    return Switching(control, lambda: [run.trainer.backend for run in runs()], on_sleep=free_copies)


def _share(sibling: RankTrainer, training: TrainingSpec, *, number: int) -> RankTrainer:
    try:
        return sibling.share(training, run=number)
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        raise OutOfMemory(f"there is no memory for another run: {describe(error)}") from error


def _free(other: RankTrainer) -> None:
    """Free a removed run's memory, after another run's adapters replace its own."""
    other.backend.activate()
    memory_of(other.backend.device).give_back()
