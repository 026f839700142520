from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest
from prometheus_client import CollectorRegistry

from tandem.errors import CheckpointDamaged, NoGradients, OutOfMemory, TandemError, WorkerDied
from tandem.protocol.fencing import LEASE_METADATA_KEY, Fence
from tandem.protocol.worker import OUT_OF_MEMORY_METADATA_KEY
from tandem.telemetry import get_log
from tandem.v1 import common_pb2, trainer_pb2
from tests.support.worker_process import RUN
from trainer_service.service.metrics import TrainerMetrics
from trainer_service.service.sequence import KEPT_RESULTS
from trainer_service.service.servicer import TrainerServicer


class Aborted(Exception):
    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class Context:
    def __init__(self, left: float | None = None) -> None:
        self.left = left
        self.metadata: dict[str, str] = {}

    def time_remaining(self) -> float | None:
        return self.left

    def set_trailing_metadata(self, pairs: tuple[tuple[str, str], ...]) -> None:
        self.metadata = dict(pairs)

    async def abort(self, code: grpc.StatusCode, sentence: str) -> NoReturn:
        raise Aborted(code, sentence)


class Operations:
    """Counts applied operations, and refuses the steps in `refused`."""

    def __init__(self) -> None:
        self.applied: list[int] = []
        self.refused: set[int] = set()
        self.progress = SimpleNamespace(begin_batch=lambda seq_id: None, end_batch=lambda: None)

    def note_refused(self, reason: str) -> None: ...

    def describe(self) -> trainer_pb2.DescribeTrainerReply:
        return trainer_pb2.DescribeTrainerReply()

    def restore(self, request: trainer_pb2.RestoreRequest) -> trainer_pb2.RestoreReply:
        if request.path == "damaged":
            return trainer_pb2.RestoreReply(failure=CheckpointDamaged("it is").to_failure())
        return trainer_pb2.RestoreReply()

    def optim_step(self, request: trainer_pb2.OptimStepRequest) -> trainer_pb2.OptimStepReply:
        number = request.header.seq_id
        self.applied.append(number)
        if number in self.refused:
            return trainer_pb2.OptimStepReply(failure=NoGradients("no gradients").to_failure())
        return trainer_pb2.OptimStepReply(step=len(self.applied))


class Runs:
    def __init__(self) -> None:
        self.by_id = {RUN: Operations()}

    def take_turn(self, run_id: str) -> Operations:
        return self.by_id[run_id]

    def describe_run(self, run_id: str) -> trainer_pb2.DescribeTrainerReply:
        return trainer_pb2.DescribeTrainerReply(run_ids=self.by_id)

    def add_run(self, request: trainer_pb2.AddRunRequest) -> trainer_pb2.AddRunReply:
        self.by_id.setdefault(request.run_id, Operations())
        return trainer_pb2.AddRunReply()

    def remove_run(self, run_id: str) -> None:
        self.by_id.pop(run_id, None)


class Engine:
    """Applies each job at once, or when `held` jobs are released."""

    def __init__(self) -> None:
        self.runs: Any = Runs()
        self.holds = False
        self.held: list[Callable[[], None]] = []

    def submit(self, job: Callable[[Any], Any], **about: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.held.append(lambda: future.set_result(job(self.runs)))
        if not self.holds:
            self.let_go()
        return future

    def let_go(self) -> None:
        held, self.held = self.held, []
        for apply in held:
            apply()


class Trainer:
    def __init__(self, *, operation_timeout: float = 60) -> None:
        self.engine: Any = Engine()
        self.registry = CollectorRegistry()
        self.broken: asyncio.Future[TandemError] = asyncio.get_running_loop().create_future()
        self.servicer = TrainerServicer(
            engine=self.engine,
            run_id=RUN,
            operation_timeout=operation_timeout,
            metrics=TrainerMetrics(self.registry),
            log=get_log(),
            broken=self.broken,
            fence=Fence(0),
        )

    @property
    def applied(self) -> list[int]:
        return self.operations.applied

    @property
    def operations(self) -> Operations:
        return self.engine.runs.by_id[RUN]

    def step(
        self, seq_id: int, *, context: Any = None, run_id: str = RUN
    ) -> asyncio.Task[trainer_pb2.OptimStepReply]:
        header = common_pb2.OperationHeader(
            run_id=run_id, seq_id=seq_id, previous_seq_id=seq_id - 1
        )
        request = trainer_pb2.OptimStepRequest(header=header)
        return asyncio.create_task(self.servicer.OptimStep(request, context or Context()))

    async def restore(self, seq_id: int, path: str = "") -> trainer_pb2.RestoreReply:
        context: Any = Context()
        request = trainer_pb2.RestoreRequest(path=path, seq_id=seq_id, run_id=RUN)
        return await self.servicer.Restore(request, context)

    async def last_seq_id(self) -> int:
        context: Any = Context()
        request = trainer_pb2.DescribeTrainerRequest(run_id=RUN)
        reply = await self.servicer.Describe(request, context)
        return reply.last_seq_id


@pytest.fixture
async def trainer() -> Trainer:
    return Trainer()


async def test_the_last_operation_and_an_older_one_are_answered_as_before(trainer):
    replies = [await trainer.step(number) for number in (1, 2, 3)]
    assert [reply.step for reply in replies] == [1, 2, 3]
    for number in (3, 1, 3):
        assert await trainer.step(number) == replies[number - 1]
    assert trainer.applied == [1, 2, 3]


async def test_a_refused_operation_is_refused_again_and_not_tried_again(trainer):
    trainer.operations.refused.add(1)
    refused = await trainer.step(1)
    assert refused.failure.type == "no_gradients"
    trainer.operations.refused.clear()  # it would succeed now
    assert await trainer.step(1) == refused
    assert trainer.applied == [1]


async def test_an_operation_in_progress_is_awaited_by_whoever_delivers_it_again(trainer):
    trainer.engine.holds = True
    first, gives_up = trainer.step(1), trainer.step(1)
    while not trainer.engine.held:
        await asyncio.wait([first, gives_up], timeout=0.001)
    gives_up.cancel()
    again = trainer.step(1)
    await asyncio.wait([gives_up])
    assert not first.done() and not again.done()
    trainer.engine.let_go()
    assert await first == await again == trainer_pb2.OptimStepReply(step=1)
    assert trainer.applied == [1]


async def test_an_operation_whose_only_caller_gave_up_is_applied_and_answered_later(trainer):
    trainer.engine.holds = True
    gone = trainer.step(1)
    while not trainer.engine.held:
        await asyncio.wait([gone], timeout=0.001)
    gone.cancel()
    await asyncio.wait([gone])
    trainer.engine.let_go()
    assert (await trainer.step(1)).step == 1
    assert trainer.applied == [1]


async def test_an_operation_whose_result_is_forgotten_is_refused_and_not_applied_again(trainer):
    for number in range(1, KEPT_RESULTS + 2):
        await trainer.step(number)
    with pytest.raises(Aborted, match="operation 1 was applied already") as caught:
        await trainer.step(1)
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert (await trainer.step(2)).step == 2  # the oldest kept one
    assert trainer.applied == list(range(1, KEPT_RESULTS + 2))


async def test_the_number_of_an_operation_of_another_kind_is_refused(trainer):
    await trainer.step(1)
    header = common_pb2.OperationHeader(run_id=RUN, seq_id=1)
    context: Any = Context()
    with pytest.raises(Aborted, match=r"one of another kind \(OptimStepReply\)") as caught:
        await trainer.servicer.Publish(trainer_pb2.PublishRequest(header=header), context)
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert trainer.applied == [1]


async def test_operations_are_applied_in_their_order_and_not_in_that_of_their_arrival(trainer):
    third, second = trainer.step(3), trainer.step(2)
    await asyncio.sleep(0)
    assert trainer.applied == []
    await asyncio.gather(trainer.step(1), second, third)
    assert trainer.applied == [1, 2, 3]


async def test_an_operation_that_waited_too_long_for_the_one_before_may_be_delivered_again():
    trainer = Trainer(operation_timeout=0.001)
    with pytest.raises(Aborted, match=r"waited 0\.001 s for operation 1, which did not") as caught:
        await trainer.step(2)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert [(await trainer.step(number)).step for number in (1, 2)] == [1, 2]


async def test_a_call_ends_at_its_deadline_and_its_operation_later(trainer):
    trainer.engine.holds = True
    with pytest.raises(Aborted, match="took too long") as caught:
        await trainer.step(1, context=Context(left=0.001))
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    trainer.engine.let_go()
    assert (await trainer.step(1)).step == 1
    assert trainer.applied == [1]


async def test_the_next_gateway_hears_in_the_middle_of_an_operation_which_runs_there_are(trainer):
    context: Any = Context()
    await trainer.servicer.AddRun(trainer_pb2.AddRunRequest(run_id="b"), context)
    trainer.engine.holds = True
    at_work = trainer.step(1)
    while not trainer.engine.held:
        await asyncio.wait([at_work], timeout=0.001)
    about = await trainer.servicer.Describe(trainer_pb2.DescribeTrainerRequest(), context)
    assert list(about.run_ids) == [RUN, "b"]
    assert not at_work.done()
    trainer.engine.let_go()
    await at_work


async def test_the_newest_operation_that_has_ended_is_told(trainer):
    assert await trainer.last_seq_id() == 0
    await trainer.step(1)
    await trainer.step(2)
    await trainer.step(1)
    assert await trainer.last_seq_id() == 2


async def test_a_restored_trainer_goes_on_after_the_operations_that_its_state_contains(trainer):
    damaged = await trainer.restore(7, path="damaged")
    assert damaged.failure.type == "checkpoint_damaged"
    assert await trainer.last_seq_id() == 0
    waiting = trainer.step(6)
    await asyncio.sleep(0)
    with pytest.raises(Aborted, match="operations are under way") as caught:
        await trainer.restore(5, path="whole")
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
    waiting.cancel()
    trainer = Trainer()
    assert not (await trainer.restore(5)).HasField("failure")
    assert await trainer.last_seq_id() == 5
    with pytest.raises(Aborted, match="operation 5 was applied already"):
        await trainer.step(5)
    await trainer.step(6)
    assert trainer.applied == [6]


@pytest.mark.parametrize(
    ("error", "code", "metadata"),
    [
        (WorkerDied("rank 1 was killed"), grpc.StatusCode.ABORTED, {}),
        (
            OutOfMemory("rank 1 failed", tokens=4096),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            {OUT_OF_MEMORY_METADATA_KEY: "4096"},
        ),
    ],
)
async def test_every_call_hears_why_the_process_group_broke(trainer, error, code, metadata):
    trainer.engine.holds = True
    contexts = [Context(), Context()]
    under_way = trainer.step(1, context=contexts[0])
    await asyncio.sleep(0)
    trainer.broken.set_result(error)
    later = trainer.step(2, context=contexts[1])
    for call, context in zip((under_way, later), contexts, strict=True):
        with pytest.raises(Aborted, match=error.message) as caught:
            await call
        assert caught.value.code is code
        assert context.metadata == metadata


# --- Several runs -----------------------------------------------------------------------------


async def add(trainer: Trainer, run_id: str) -> None:
    context: Any = Context()
    await trainer.servicer.AddRun(trainer_pb2.AddRunRequest(run_id=run_id), context)


async def remove(trainer: Trainer, run_id: str) -> None:
    context: Any = Context()
    await trainer.servicer.RemoveRun(trainer_pb2.RemoveRunRequest(run_id=run_id), context)


async def test_each_run_has_an_order_and_results_of_its_own(trainer):
    await add(trainer, "other")
    await trainer.step(1)
    first, second = trainer.step(2, run_id="other"), trainer.step(2)
    assert (await second).step == 2, "an operation waits for those of its own run alone"
    assert not first.done()
    assert (await trainer.step(1, run_id="other")).step == 1
    assert (await first).step == 2
    await add(trainer, "other")  # delivered again
    assert await trainer.step(2, run_id="other") == await first
    assert trainer.applied == trainer.engine.runs.by_id["other"].applied == [1, 2]


async def test_a_run_that_is_not_hosted_is_not_found(trainer):
    with pytest.raises(Aborted, match="does not host the run other") as caught:
        await trainer.step(1, run_id="other")
    assert caught.value.code is grpc.StatusCode.NOT_FOUND


async def test_a_run_is_removed_after_what_was_sent_and_before_what_waits(trainer):
    await add(trainer, "other")
    assert trainer.registry.get_sample_value("tandem_trainer_runs") == 2
    other = trainer.engine.runs.by_id["other"]
    trainer.engine.holds = True
    sent, waits = trainer.step(1, run_id="other"), trainer.step(3, run_id="other")
    await asyncio.sleep(0)
    removed = asyncio.create_task(remove(trainer, "other"))
    await asyncio.sleep(0)
    with pytest.raises(Aborted, match="does not host") as caught:
        await trainer.step(2, run_id="other")
    assert caught.value.code is grpc.StatusCode.NOT_FOUND
    with pytest.raises(Aborted, match="does not host"):
        await waits
    trainer.engine.let_go()
    await removed
    assert trainer.registry.get_sample_value("tandem_trainer_runs") == 1
    assert (await sent).step == 1
    assert other.applied == [1]
    trainer.engine.holds = False
    await remove(trainer, "other")  # delivered again
    with pytest.raises(Aborted, match="it is the last run"):
        await remove(trainer, RUN)
    assert (await trainer.step(1)).step == 1


async def test_memory_that_one_run_had_too_little_of_is_not_told_to_another(trainer):
    await add(trainer, "other")
    trainer.engine.holds = True
    contexts = [Context(), Context()]
    calls = [
        trainer.step(1, context=contexts[0]),
        trainer.step(1, context=contexts[1], run_id="other"),
    ]
    await asyncio.sleep(0)
    trainer.broken.set_result(OutOfMemory("rank 1 failed", tokens=4096))
    with pytest.raises(Aborted, match="rank 1 failed") as mine:
        await calls[0]
    with pytest.raises(Aborted, match="rank 1 failed") as theirs:
        await calls[1]
    assert mine.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert theirs.value.code is grpc.StatusCode.ABORTED
    assert contexts[1].metadata == {}


async def test_an_operation_may_wait_for_one_that_no_gateway_sends_any_more(trainer):
    waiting = trainer.step(6)
    await asyncio.sleep(0)
    assert not (await trainer.restore(5)).HasField("failure")
    await waiting
    assert trainer.applied == [6]


async def test_a_trainer_that_still_writes_from_its_memory_stays_awake_and_says_why(trainer):
    trainer.engine.runs.release_copies = lambda: False
    trainer.engine.runs.switching = SimpleNamespace(asleep=False)
    trainer.servicer._fence = Fence(1)
    context: Any = Context()
    context.invocation_metadata = lambda: ((LEASE_METADATA_KEY, "1"),)
    reply = await trainer.servicer.Sleep(common_pb2.SleepRequest(), context)
    assert reply.failure.type == "storage_failed"
    assert "files are still being written from its memory" in reply.failure.message
    assert (await trainer.step(1, context=context)).step == 1
