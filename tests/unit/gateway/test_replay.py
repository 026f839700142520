from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.runs.recovery.replay_log import Recovery, ReplayLog, SentCall, Snapshot, recovery_of
from tandem.errors import InvalidRequest
from tandem.settings.gateway import GatewaySettings

STATE = ("forward_backward", "optim_step", "load_weights")


def call(seq_id: int, kind: str = "forward_backward", *, size: int = 0, **more) -> SentCall:
    return SentCall(
        seq_id=seq_id,
        kind=kind,
        size=size,
        has_payload=size > 0,
        **more,
    )


@dataclass
class Watched:
    log: ReplayLog
    dropped: list[int] = field(default_factory=list)

    def answered(self, seq_id: int, kind: str = "forward_backward", *, seconds=1.0, size=0) -> None:
        self.log.note_sent(call(seq_id, kind, size=size))
        self.log.note_answered(seq_id, seconds=seconds)

    def replayed(self, snapshot: Snapshot | None = None) -> list[int]:
        return [each.seq_id for each in self.log.calls_after(snapshot or self.log.newest)]


@pytest.fixture
def watched() -> Watched:
    return make()


def make(**changes) -> Watched:
    dropped: list[int] = []

    def drop(_after: int, _up_to: int, with_payload: list[int]) -> None:
        dropped.extend(with_payload)

    return Watched(ReplayLog(Recovery(**changes), dropped=drop), dropped)


def test_what_changes_nothing_is_not_replayed_once_it_is_answered(watched):
    for seq_id, kind in enumerate(["forward_backward", "forward", "save_weights", "optim_step"]):
        watched.answered(seq_id, kind)
    assert watched.replayed() == [0, 3]
    assert watched.log.held(1) is None


def test_what_was_under_way_is_not_replayed_but_delivered_again(watched):
    watched.answered(0)
    watched.log.note_sent(call(1))
    assert watched.replayed() == [0]
    assert watched.log.first_unanswered.seq_id == 1


def test_two_snapshots_are_kept_and_what_the_older_covers_is_dropped(watched):
    for seq_id in range(6):
        watched.answered(seq_id, size=10)
    first, second, third = (Snapshot(seq_id=s, step=s, folder=f"s{s}") for s in (1, 3, 4))
    assert watched.log.add_snapshot(first, cost=0.1) == []
    assert watched.log.add_snapshot(second, cost=0.1) == []
    assert watched.dropped == [0, 1]
    assert watched.log.bytes == 40
    assert watched.log.add_snapshot(third, cost=0.1) == [first]
    assert watched.log.snapshots == [third, second]
    assert watched.replayed(third) == [5]
    assert watched.replayed(second) == [4, 5]
    watched.log.lose(third)
    assert watched.log.newest == second


def test_when_there_is_no_room_what_only_the_older_snapshot_needs_goes_first():
    watched = make(log_bytes=45)
    for seq_id in range(4):
        watched.answered(seq_id, size=10)
    newest = Snapshot(seq_id=2, folder="s2")
    watched.log.add_snapshot(newest, cost=0.1)
    watched.answered(4, size=10)
    assert watched.log.complete
    assert watched.log.snapshots == [newest]
    assert watched.replayed() == [3, 4]
    watched.answered(5, size=30)
    assert not watched.log.complete


def test_a_save_may_become_a_newer_snapshot_while_one_is_written(watched):
    for seq_id in range(6):
        watched.answered(seq_id)
    written, saved, another = (Snapshot(seq_id=s, folder=f"s{s}") for s in (1, 3, 5))
    assert watched.log.add_snapshot(saved) == []
    assert watched.log.add_snapshot(written, cost=0.1) == []
    assert watched.log.snapshots == [saved, written]
    assert watched.log.work == 2.0
    watched.log.add_snapshot(another)
    assert watched.log.add_snapshot(written, cost=0.1) == [written], "two newer ones are there"


def test_a_checkpoint_that_was_loaded_is_let_go_when_nothing_loads_it_again(watched):
    let_go = []
    watched.log.note_sent(call(0, "load_weights", release=lambda: let_go.append(0)))
    watched.log.note_answered(0, seconds=1.0)
    watched.log.add_snapshot(Snapshot(seq_id=1, folder="a"), cost=0.1)
    assert let_go == []
    watched.log.add_snapshot(Snapshot(seq_id=2, folder="b"), cost=0.1)
    assert let_go == [0]
    watched.log.note_sent(call(3, "load_weights", release=lambda: let_go.append(3)))
    watched.log.close()
    assert let_go == [0, 3]


@pytest.mark.parametrize(
    ("cost", "work", "wanted"),
    [
        (0.1, 4.9, False),  # 2 % of 5 s
        (0.1, 5.1, True),
        (10.0, 59.0, False),  # 2 % would be 500 s of work, but a replay should take 60 s
        (10.0, 61.0, True),
        (30.0, 61.0, False),  # snapshots must not take half of the time
        (30.0, 121.0, True),
    ],
)
def test_a_snapshot_is_taken_when_it_is_worth_its_measured_cost(watched, cost, work, wanted):
    watched.log.add_snapshot(Snapshot(seq_id=0, folder="s"), cost=cost)
    watched.answered(1, seconds=work)
    assert watched.log.wants_snapshot(expected_bytes=0) == wanted


def test_the_cost_of_the_first_snapshot_is_estimated_from_its_size(watched):
    watched.answered(1, seconds=5.0)
    assert watched.log.wants_snapshot(expected_bytes=12 * 10**6)
    assert not watched.log.wants_snapshot(expected_bytes=12 * 10**9)


def test_many_bytes_and_many_calls_want_a_snapshot_too():
    watched = make(log_bytes=100)
    watched.answered(0, seconds=0.0, size=49)
    assert not watched.log.wants_snapshot(expected_bytes=10**9)
    watched.answered(1, seconds=0.0, size=1)
    assert watched.log.wants_snapshot(expected_bytes=10**9)
    watched = make()
    for seq_id in range(5000):
        watched.answered(seq_id, seconds=0.0)
    assert watched.log.wants_snapshot(expected_bytes=10**9)


def test_too_many_bytes_are_forgotten_until_the_next_snapshot():
    watched = make(log_bytes=100)
    watched.answered(0, size=60)
    watched.log.note_sent(call(1, size=60))
    assert not watched.log.complete
    assert watched.dropped == [0]
    assert watched.log.wants_snapshot(expected_bytes=10**12)
    watched.log.note_answered(1, seconds=1.0)
    assert watched.log.bytes == 0
    snapshot = Snapshot(seq_id=2, folder="s")
    assert watched.log.add_snapshot(snapshot, cost=0.1) == []
    assert watched.log.complete
    assert watched.log.snapshots == [snapshot]


def test_a_snapshot_that_is_older_than_what_was_forgotten_does_not_make_the_log_whole():
    watched = make(log_bytes=100)
    watched.answered(0, "optim_step")  # starts a snapshot of this step
    watched.answered(1, size=60)
    watched.answered(2, size=60)
    assert watched.dropped == [1, 2]
    watched.log.add_snapshot(Snapshot(seq_id=0, folder="old"), cost=0.1)
    assert not watched.log.complete
    assert watched.log.wants_snapshot(expected_bytes=10**12)
    later = Snapshot(seq_id=3, folder="new")
    assert watched.log.add_snapshot(later, cost=0.1) == [Snapshot(seq_id=0, folder="old")]
    assert watched.log.complete


def test_a_call_that_was_not_answered_is_never_forgotten():
    watched = make(log_bytes=100)
    watched.log.note_sent(call(0, size=60))
    watched.answered(1, size=60)
    watched.log.add_snapshot(Snapshot(seq_id=1, folder="s"), cost=0.1)
    assert watched.log.first_unanswered.seq_id == 0
    assert 0 not in watched.dropped


def test_a_log_whose_snapshots_are_all_lost_is_not_whole(watched):
    for seq_id in range(4):
        watched.answered(seq_id)
    snapshots = [Snapshot(seq_id=s, folder=f"s{s}") for s in (1, 2)]
    for snapshot in snapshots:
        watched.log.add_snapshot(snapshot, cost=0.1)
    assert watched.log.complete
    for snapshot in snapshots:
        watched.log.lose(snapshot)
    assert not watched.log.complete
    assert watched.log.newest.step == 0


def test_the_creator_of_a_run_may_turn_recovery_off_or_choose_the_seconds():
    default = GatewaySettings(recovery_share=0.5)
    assert recovery_of(None, default) == Recovery(share=0.5)
    assert recovery_of({"other": "x"}, default) == Recovery(share=0.5)
    assert recovery_of({"tandem.recovery": "off"}, default) is None
    assert recovery_of(None, GatewaySettings(recovery_enabled=False)) is None
    assert recovery_of({"tandem.recovery": "600"}, default).replay == 600
    for wrong in ("on", "-1", "nan", ["off"], {}):
        with pytest.raises(InvalidRequest, match=r"tandem\.recovery"):
            recovery_of({"tandem.recovery": wrong}, default)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_replay_after_any_snapshot_rebuilds_the_state(data):
    """The model of a trainer has the list of calls that changed its state."""
    watched = make(log_bytes=data.draw(st.sampled_from([3, 10, 10**9])))
    log, state, states, next_seq, pending = watched.log, [], {-1: []}, 0, []
    for _ in range(data.draw(st.integers(0, 40))):
        action = data.draw(st.sampled_from(["send", "send", "answer", "answer", "snapshot"]))
        if action == "send" and len(pending) < 4:
            kind = data.draw(st.sampled_from([*STATE, "forward", "save_weights"]))
            log.note_sent(call(next_seq, kind, size=1))
            pending.append((next_seq, kind))
            next_seq += 1
        elif action == "answer" and pending:
            seq_id, kind = pending.pop(0)
            if kind in STATE:
                state.append(seq_id)
            states[seq_id] = list(state)
            log.note_answered(seq_id, seconds=1.0)
        elif action == "snapshot":  # of any step since the newest one
            since = [seq_id for seq_id in states if seq_id > log.newest.seq_id]
            if since:
                chosen = data.draw(st.sampled_from(since))
                log.add_snapshot(Snapshot(seq_id=chosen, folder=f"s{chosen}"), cost=0.1)
    for snapshot in log.snapshots if log.complete else []:
        rebuilt = states[snapshot.seq_id] + [
            each.seq_id for each in log.calls_after(snapshot) if each.changes_state
        ]
        assert rebuilt == state
        assert all(log.held(seq_id) for seq_id, _ in pending)
    assert log.bytes == len(log._calls)


def test_a_snapshot_is_worth_while_that_costs_less_than_the_work_it_covers(watched):
    watched.answered(1, "forward_backward", seconds=9.0)
    assert not watched.log.is_worth_snapshot(expected_bytes=0), "there was no step yet"
    watched.answered(2, "optim_step", seconds=1.0)
    watched.answered(3, "forward_backward", seconds=50.0)
    ten_seconds = 2 * 10**9
    assert watched.log.is_worth_snapshot(expected_bytes=ten_seconds - 1)
    assert not watched.log.is_worth_snapshot(expected_bytes=ten_seconds)
    watched.log.add_snapshot(Snapshot(seq_id=2, step=1), cost=1e-3)
    assert not watched.log.is_worth_snapshot(expected_bytes=0), "the newest one covers it"
    watched.answered(4, "optim_step", seconds=0.0)
    assert watched.log.is_worth_snapshot(expected_bytes=10**12), "its cost was measured"


def test_without_the_calls_for_a_replay_a_snapshot_is_worth_anything():
    watched = make(log_bytes=10)
    watched.answered(1, size=20)
    assert not watched.log.complete
    assert watched.log.is_worth_snapshot(expected_bytes=10**12)
