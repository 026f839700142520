from __future__ import annotations

import asyncio
import random

import pytest

from gateway.runs.dispatcher import DISPATCH_WINDOW, Dispatcher
from gateway.runs.operations import LoadWeights, Operation, Progress, RunBroken, SaveWeights
from gateway.storage.futures.table import Future, Result
from tandem.errors import InternalError, InvalidRequest, SequenceGap, SessionFinished, WorkerDied
from tests.support.virtual_time import run_in_virtual_time
from tests.support.work import calls_in
from trainer_service.service.sequence import KEPT_RESULTS

DONE = Result(media="json")


class FakeRunner:
    """Notes its calls. Operations end when the test sets `gates[seq_id]`, or at once."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.calls = {}
        self.gates: dict[int, asyncio.Event] = {}
        self.prepare_errors: dict[int, Exception] = {}
        self.errors: dict[int, Exception] = {}
        self.late_errors: dict[int, Exception] = {}

    async def carry_out(self, call):
        seq_id = call.operation.seq_id
        if (error := self.prepare_errors.get(seq_id)) is not None:
            raise error
        call.send()
        self.sent.append((call.previous_seq_id, seq_id))
        self.calls[seq_id] = call
        if (gate := self.gates.get(seq_id)) is not None:
            await gate.wait()
        if (error := self.errors.get(seq_id)) is not None:
            raise error
        call.answered = True
        if (error := self.late_errors.get(seq_id)) is not None:
            raise error
        return DONE


class World:
    def __init__(
        self, *, window: int = 4, window_bytes: int = 100, gap_timeout: float = 60
    ) -> None:
        self.runner = FakeRunner()
        self.outcomes = {}
        self.dispatcher = Dispatcher(
            window=window,
            window_bytes=window_bytes,
            gap_timeout=gap_timeout,
            end=lambda one, outcome: self.outcomes.setdefault(one.seq_id, outcome),
        )

    def put(self, *seq_ids: int, kind: str = "forward_backward", **changes) -> None:
        for seq_id in seq_ids:
            future = Future(request_id=f"r:{seq_id}", source="operation", describe=lambda: None)
            self.dispatcher.put(
                Operation(run_id="r", seq_id=seq_id, kind=kind, future=future, **changes)
            )

    def hold(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            self.runner.gates[seq_id] = asyncio.Event()

    def serve(self, **options) -> asyncio.Task[None]:
        return asyncio.create_task(self.dispatcher.serve(self.runner.carry_out, **options))

    @property
    def sent(self) -> list[int]:
        return [seq_id for _, seq_id in self.runner.sent]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def stop(serving: asyncio.Task[None]) -> None:
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_operations_go_in_order_and_each_names_the_one_before_it():
    world = World()
    world.put(3, 1, 2)
    serving = world.serve(sent=0)
    await settle()
    assert world.runner.sent == [(0, 1), (1, 2), (2, 3)]
    assert world.outcomes == {1: DONE, 2: DONE, 3: DONE}
    assert world.dispatcher.queued == 0
    await stop(serving)


async def test_as_many_are_under_way_as_the_window_has_and_a_released_one_makes_room():
    world = World(window=2)
    world.hold(1, 2, 3)
    world.put(1, 2, 3)
    serving = world.serve()
    await settle()
    assert world.sent == [1, 2]
    world.runner.calls[1].release()
    await settle()
    assert world.sent == [1, 2, 3]
    assert world.dispatcher.under_way == 3
    world.runner.gates[2].set()
    await settle()
    assert world.outcomes == {2: DONE}
    await stop(serving)


async def test_payloads_under_way_are_bounded_and_a_single_one_always_goes():
    world = World(window_bytes=100)
    world.hold(1, 2)
    world.put(1, 2, size=150)
    serving = world.serve()
    await settle()
    assert world.sent == [1]
    world.runner.gates[1].set()
    await settle()
    assert world.sent == [1, 2]
    await stop(serving)


async def test_a_named_save_waits_until_those_before_it_have_ended():
    world = World()
    world.hold(1)
    world.put(1)
    world.put(2, kind="save_weights", body=SaveWeights(path="a"))
    serving = world.serve()
    await settle()
    assert world.sent == [1]
    world.runner.gates[1].set()
    await settle()
    assert world.sent == [1, 2]
    await stop(serving)


async def test_what_fails_before_it_is_sent_is_skipped_and_the_trainer_is_told_once():
    world = World()
    world.runner.prepare_errors[1] = InvalidRequest("no such loss")
    world.put(1, 2, kind="forward_backward")
    world.put(3, kind="optim_step", refused=InvalidRequest("no such field"))
    world.put(4, 5, kind="optim_step")
    serving = world.serve()
    await settle()
    assert [type(world.outcomes[seq]) for seq in (1, 3)] == [InvalidRequest, InvalidRequest]
    assert world.runner.sent == [(-1, 2), (2, 4), (4, 5)]
    assert "no such loss" in world.runner.calls[2].gradients_incomplete
    assert {world.runner.calls[seq].gradients_incomplete for seq in (4, 5)} == {""}
    await stop(serving)


async def test_a_load_hears_of_what_was_refused_before_it_and_the_step_after_it_does_not():
    """The trainer knows whether the load succeeded, and so whether the step may run."""
    world = World()
    world.put(1, refused=InvalidRequest("no such loss"))
    world.put(2, kind="load_weights", body=LoadWeights(path="a"))
    world.put(3)
    world.put(4, kind="optim_step")
    serving = world.serve()
    await settle()
    told = {seq: call.gradients_incomplete for seq, call in world.runner.calls.items()}
    assert "no such loss" in told[2]
    assert (told[3], told[4]) == ("", "")
    await stop(serving)


async def test_what_was_refused_is_told_with_the_next_call_that_a_replay_repeats():
    world = World()
    world.put(1, refused=InvalidRequest("no such loss"))
    world.put(2, kind="forward")
    world.put(3, kind="optim_step")
    serving = world.serve()
    await settle()
    told = {seq: call.gradients_incomplete for seq, call in world.runner.calls.items()}
    assert told[2] == ""
    assert "no such loss" in told[3]
    await stop(serving)


async def test_an_operation_that_fails_leaves_the_run_as_it_was():
    world = World()
    world.runner.errors[1] = InvalidRequest("a shape")
    world.put(1, 2)
    serving = world.serve()
    await settle()
    assert isinstance(world.outcomes[1], InvalidRequest)
    assert world.outcomes[2] is DONE
    await stop(serving)


async def test_a_fault_after_the_trainers_answer_fails_the_operation_alone_and_quotes_nothing():
    world = World()
    world.runner.late_errors[1] = KeyError("INSERT INTO operations")
    world.put(1, 2)
    serving = world.serve()
    await settle()
    assert isinstance(world.outcomes[1], InternalError)
    assert world.outcomes[1].message == "KeyError in the gateway; see its log"
    assert world.outcomes[2] is DONE
    await stop(serving)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(RunBroken(WorkerDied("gone")), WorkerDied), (KeyError("a fault"), InternalError)],
)
async def test_an_operation_that_ends_the_run_has_its_error_and_stops_the_others(raised, expected):
    world = World()
    world.hold(2)
    world.runner.errors[1] = raised
    world.put(1, 2, 4)
    with pytest.raises(RunBroken) as broken:
        await asyncio.wait_for(world.serve(), 60)
    assert isinstance(broken.value.error, expected)
    assert world.outcomes == {1: broken.value.error}
    world.dispatcher.end(broken.value.error)
    assert world.outcomes == dict.fromkeys((1, 2, 4), broken.value.error)
    world.put(5)
    assert world.outcomes[5] is broken.value.error


async def test_before_the_trainer_is_ready_operations_wait_for_its_start():
    world = World()
    world.put(1)
    await settle()
    assert world.sent == []
    waiting = world.dispatcher.describe(1)
    assert waiting.paused and "the trainer is starting" in waiting.reason
    world.dispatcher.end(SessionFinished("over"))
    assert isinstance(world.outcomes[1], SessionFinished)


async def test_each_of_many_is_told_how_many_are_before_it():
    world = World()
    world.hold(1)
    seq_ids = list(range(1, 1000))
    random.Random(0).shuffle(seq_ids)
    world.put(*seq_ids, size=99)
    serving = world.serve()
    await settle()
    assert "the trainer is at work on it" in world.dispatcher.describe(1).reason
    at_work = "before this one; forward_backward 1: the trainer is at work on it ("
    assert world.dispatcher.describe(2).reason.startswith(f"1 operation {at_work}")
    assert world.dispatcher.describe(900).reason.startswith(f"899 operations {at_work}")
    assert calls_in(lambda: world.dispatcher.describe(900)) < 20, "it looks at none of the others"
    world.dispatcher.end(SessionFinished("over"))
    assert set(world.outcomes) == set(seq_ids)
    await stop(serving)


async def test_clients_are_told_which_operation_is_computed_and_how_much_of_it_is_done():
    world = World()
    world.hold(1, 2)
    world.put(1)
    world.put(2, kind="optim_step")
    serving = world.serve()
    await settle()
    world.runner.calls[1].progress = Progress(seconds=8.0, tokens_done=4096, tokens=65536)
    doing = "forward_backward 1: the trainer is at work on it (4,096 of 65,536 tokens, 512 tokens/s"
    assert world.dispatcher.describe(1).reason == f"{doing}, 8 s)"
    assert world.dispatcher.describe(2).reason == f"1 operation before this one; {doing}, 8 s)"
    world.runner.calls[1].progress = Progress(seconds=40.0, compiling=True)
    doing = "forward_backward 1: the trainer is at work on it (compiling, 40 s)"
    assert world.dispatcher.describe(1).reason == doing
    world.runner.calls[1].waiting_for = "the sampler is loading the new weights"
    assert world.dispatcher.describe(1).reason.startswith(
        "forward_backward 1: the sampler is loading the new weights ("
    )
    world.runner.calls[1].release()
    assert world.dispatcher.first is world.runner.calls[2], "at which the trainer works now"
    world.dispatcher.end(SessionFinished("over"))
    await stop(serving)


def test_a_gap_that_nobody_fills_fails_those_behind_it_and_what_comes_later():
    async def scenario() -> None:
        world = World(gap_timeout=60)
        serving = world.serve()
        await settle()
        world.put(2**52, 7, 2**40)
        reason = world.dispatcher.describe(7).reason
        assert "operation 1, which comes before, has not arrived" in reason
        assert world.dispatcher.awaits(1) and not world.dispatcher.awaits(2)
        await asyncio.sleep(30)
        assert world.outcomes == {}
        await asyncio.sleep(31)
        assert len(world.outcomes) == 3
        world.put(5)
        assert {type(outcome) for outcome in world.outcomes.values()} == {SequenceGap}
        passed = world.dispatcher.passed
        assert (passed(5), passed(2**52), passed(2**52 + 1)) == (True, True, False)
        world.put(2**52 + 1, kind="optim_step")
        await settle()
        assert "operation 1 did not arrive" in world.runner.calls[2**52 + 1].gradients_incomplete
        await stop(serving)

    run_in_virtual_time(scenario())


def test_a_gap_that_is_filled_in_time_holds_nothing_back():
    async def scenario() -> None:
        world = World(gap_timeout=60)
        serving = world.serve()
        world.put(2)
        await settle()
        world.put(1)
        await asyncio.sleep(61)
        assert world.outcomes == {1: DONE, 2: DONE}
        await stop(serving)

    run_in_virtual_time(scenario())


async def test_a_dispatcher_that_drains_ends_what_is_under_way_and_begins_nothing():
    world = World(window=2)
    world.hold(1, 2)
    serving = world.serve()
    world.put(1, 2, 3)
    await settle()
    draining = asyncio.create_task(world.dispatcher.drain())
    world.runner.gates[1].set()
    await settle()
    assert not draining.done()
    world.runner.gates[2].set()
    await settle()
    assert draining.done()
    world.put(4)
    await settle()
    assert world.sent == [1, 2]
    assert world.dispatcher.queued == 2
    await stop(serving)


async def test_what_only_a_sampler_works_at_is_not_waited_for_and_nothing_is_without_operations():
    world = World()
    await world.dispatcher.drain()
    world = World()
    world.hold(1)
    serving = world.serve()
    world.put(1)
    await settle()
    draining = asyncio.create_task(world.dispatcher.drain())
    await settle()
    assert not draining.done()
    world.runner.calls[1].release()
    await settle()
    assert draining.done()
    await stop(serving)


def test_no_gap_is_given_up_while_nothing_can_arrive():
    async def scenario() -> World:
        world = World(gap_timeout=60)
        serving = world.serve()
        world.put(2)
        await settle()
        await world.dispatcher.drain()
        await asyncio.sleep(1000)
        await stop(serving)
        return world

    assert run_in_virtual_time(scenario()).outcomes == {}


def test_no_gateway_sends_more_ahead_than_a_trainer_remembers():
    assert DISPATCH_WINDOW <= KEPT_RESULTS
