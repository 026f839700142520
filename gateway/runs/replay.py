"""What a run's trainer can be computed again from: its snapshots, and the calls after them.

The log notes each call when it is sent, in the order in which the trainer applies and answers them.
Calls that changed the trainer's state stay until two snapshots cover them: the newest may be
damaged. The journal has the same in rows, from which the next gateway resumes the log. See
`docs/reliability.md`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import NonNegativeFloat, TypeAdapter, ValidationError

from gateway.runs.operations import Body, Kind
from tandem.errors import CheckpointDamaged, CustomLossFailed, InvalidRequest
from tandem.settings.gateway import GatewaySettings
from tandem.v1 import trainer_pb2

METADATA_KEY = "tandem.recovery"
VARIABLE_FAILURES = frozenset({CheckpointDamaged.type, CustomLossFailed.type})
"""Those that need not come again with the same call: the disk decides, or how busy the machine
is."""
_SECONDS: TypeAdapter[float] = TypeAdapter(NonNegativeFloat)
_GENERATIONS = 2
_MANY_CALLS = 5000
"""Calls after which a snapshot is asked for, however little work they were."""
REPLAY_SECONDS = 60.0
LOG_BYTES = 2**30
_MOST_CALLS = 100_000
_BYTES_PER_SECOND = 2e8
"""At which the first snapshot is taken to be written, until that was measured."""
_NEARLY = 0.75
"""Of the bytes that the log may take; at half of them, a snapshot is asked for."""
_LARGEST_SHARE = 0.25
"""Of the training time that snapshots may take, even if a replay takes longer for it."""


@dataclass(frozen=True)
class Recovery:
    """How the trainer of a run is restored when it dies. If it is not `enabled`, the run ends.

    Snapshots take the `share` of the training time. `replay` bounds the seconds of training that
    are replayed, unless snapshots would then take a quarter of the time. `log_bytes` bounds the
    payloads that a run keeps for a replay; half of it asks for a snapshot.
    """

    enabled: bool = True
    share: float = 0.02
    replay: float = REPLAY_SECONDS
    log_bytes: int = LOG_BYTES


def recovery_of(user_metadata: Mapping[str, object] | None, settings: GatewaySettings) -> Recovery:
    """Return how a run is restored. Its creator may turn that off, or say how many seconds are
    replayed at most: `{"tandem.recovery": "off"}`, `{"tandem.recovery": "600"}`.

    Raises `InvalidRequest` for any other value.
    """
    chosen = (user_metadata or {}).get(METADATA_KEY)
    usual = Recovery(
        enabled=settings.recovery_enabled,
        share=settings.recovery_share,
        replay=REPLAY_SECONDS,
        log_bytes=LOG_BYTES,
    )
    if chosen is None:
        return usual
    if chosen == "off":
        return replace(usual, enabled=False)
    try:
        return replace(usual, replay=_SECONDS.validate_python(chosen))
    except ValidationError as error:
        raise InvalidRequest(
            f'{METADATA_KEY} of the user_metadata is {str(chosen)[:40]!r}: it is "off", or the '
            "seconds of training that are replayed at most after a crash"
        ) from error


@dataclass(frozen=True)
class Snapshot:
    """The state of a trainer after the operation `seq_id`. Without a `folder` it is that of a run
    before its first operation. `bytes` is its size."""

    seq_id: int = -1
    step: int = 0
    folder: str = ""
    bytes: int = 0


@dataclass(eq=False)
class SentCall:
    """A call that was sent to the trainer: `request` is its message, without a payload (the journal
    has it, if it `has_payload`) and without the definition of the loss that `body` names.

    `size` is its bytes, with those of its payload. Once it is `answered`, it took the trainer
    `seconds` and had this `failure`, "" for none, with this `reason`. `release` is called when it
    is forgotten.
    """

    seq_id: int
    kind: Kind
    changes_state: bool
    request: bytes = b""
    body: Body | None = None
    size: int = 0
    has_payload: bool = False
    answered: bool = False
    seconds: float = 0.0
    failure: str = ""
    reason: str = ""
    release: Callable[[], None] | None = None

    @property
    def changes_weights(self) -> bool:
        return self.kind in ("optim_step", "load_weights") and not self.failure

    @property
    def is_replayed(self) -> bool:
        """Whether a replay sends it again. Of what failed for a reason that may be gone (a disk, a
        busy machine), it does what came of it: see `leaves_incomplete`."""
        return self.failure not in VARIABLE_FAILURES

    @property
    def leaves_incomplete(self) -> str:
        """Say why the gradients are incomplete after it has failed, "" if it does not say."""
        if self.kind == "forward_backward":
            return self.reason
        header = trainer_pb2.LoadCheckpointRequest.FromString(self.request).header
        return header.gradients_incomplete


class ReplayLog:
    """The calls of one run that a restored trainer would need. `dropped` is called when the calls
    after a `seq_id` up to another one are needed no longer, with the two and with the numbers of
    the calls that have a payload. `missing_to` is the newest such."""

    def __init__(
        self, recovery: Recovery, *, dropped: Callable[[int, int, list[int]], None]
    ) -> None:
        self._recovery = recovery
        self._dropped = dropped
        self._calls: dict[int, SentCall] = {}
        self._snapshots = deque([Snapshot()])
        self._answered = -1
        self.missing_to = -1
        self._cost: float | None = None
        self.bytes = 0
        self.work = 0.0
        """Seconds that the trainer worked since the newest snapshot: what a replay takes."""

    @property
    def complete(self) -> bool:
        """Whether all calls after the newest snapshot are there, so that the run can be
        restored."""
        return self.newest.seq_id >= self.missing_to

    @property
    def nearly_full(self) -> bool:
        return self.bytes > _NEARLY * self._recovery.log_bytes

    @property
    def why_incomplete(self) -> str:
        return (
            f"it cannot be restored: more than {self._recovery.log_bytes} bytes came since the "
            "last snapshot"
        )

    @property
    def newest(self) -> Snapshot:
        return self._snapshots[-1] if self._snapshots else Snapshot()

    @property
    def snapshots(self) -> list[Snapshot]:
        """Return those that the log goes back to, newest first."""
        return [each for each in reversed(self._snapshots) if each.seq_id >= self.missing_to]

    @property
    def first_unanswered(self) -> SentCall | None:
        """Return the call that the trainer is at, if it is at one."""
        return min(
            (call for call in self._calls.values() if not call.answered),
            key=lambda call: call.seq_id,
            default=None,
        )

    @property
    def newest_change(self) -> int:
        """Return the newest operation of which the state must contain what it changed, -1 for
        none."""
        answered = [call.seq_id for call in self._calls.values() if call.answered]
        return max([self.missing_to, self.newest.seq_id, *answered])

    def held(self, seq_id: int) -> SentCall | None:
        """Return a call, if it may be needed again."""
        return self._calls.get(seq_id)

    def resume(
        self,
        *,
        snapshots: Sequence[Snapshot],
        calls: Sequence[SentCall],
        missing_to: int,
        answered: int,
    ) -> None:
        """Take over what an earlier log had: `snapshots`, oldest first, the calls after them, the
        newest `seq_id` that it had dropped and the newest that was answered."""
        self._snapshots.extend(snapshots)
        if len(snapshots) >= _GENERATIONS or missing_to >= 0:
            self._snapshots.popleft()
        self._calls = {call.seq_id: call for call in calls}
        self.missing_to, self._answered = missing_to, answered
        self.bytes = sum(call.size for call in calls)
        self.work = sum(call.seconds for call in calls if call.seq_id > self.newest.seq_id)

    def note_sent(self, call: SentCall) -> None:
        """Note a call that is about to be sent. When they become too many, those before the newest
        snapshot are forgotten, and if that is not enough, all that were answered."""
        self._calls[call.seq_id] = call
        self.bytes += call.size
        self._keep_within_bounds()

    def note_answered(
        self, seq_id: int, *, seconds: float, failure: str = "", reason: str = ""
    ) -> None:
        """Note that the trainer has answered, after so many seconds of work."""
        call = self._calls.get(seq_id)
        if call is None or call.answered:
            return
        self._answered = max(self._answered, seq_id)
        call.answered, call.seconds = True, seconds
        call.failure, call.reason = failure, reason
        if not call.changes_state:
            self._forget([call])
        elif not self.complete:
            self._drop_up_to(seq_id)
        else:
            self.work += seconds
            self._keep_within_bounds()

    def wants_snapshot(self, *, expected_bytes: int) -> bool:
        """Whether the work since the newest snapshot is worth another one, of about this size."""
        cost = self._cost_of(expected_bytes)
        latest = max(self._recovery.replay, cost / _LARGEST_SHARE)
        return (
            not self.complete
            or self.work >= min(cost / self._recovery.share, latest)
            or self.bytes >= self._recovery.log_bytes / 2
            or len(self._calls) >= _MANY_CALLS
        )

    def is_worth_snapshot(self, *, expected_bytes: int) -> bool:
        """Whether a snapshot of about this size, taken now, costs less than a replay of what it
        would cover: the work up to the newest step or load."""
        changes = [c.seq_id for c in self._calls.values() if c.answered and c.changes_weights]
        upto = max(changes, default=-1)
        after = self.newest.seq_id
        work = sum(c.seconds for c in self._calls.values() if after < c.seq_id <= upto)
        return not self.complete or work > self._cost_of(expected_bytes)

    def _cost_of(self, expected_bytes: int) -> float:
        """Return the seconds that a snapshot takes, as far as is known."""
        return self._cost if self._cost is not None else expected_bytes / _BYTES_PER_SECOND

    def add_snapshot(self, snapshot: Snapshot, *, cost: float | None = None) -> list[Snapshot]:
        """Note a snapshot that was written, at a `cost` in seconds if it was asked for. Return
        those that are superfluous now; while one was written, a save may have become a newer."""
        if cost is not None:
            self._cost = cost
        # From one that is older than a missing call, nothing leads to the present.
        useful = [each for each in self._snapshots if each.seq_id >= self.missing_to]
        useful = sorted([*useful, snapshot], key=lambda each: each.seq_id)
        kept, before = useful[-_GENERATIONS:], [*self._snapshots, snapshot]
        self._snapshots = deque(kept)
        self._drop_up_to(kept[0].seq_id)
        self.work = sum(c.seconds for c in self._calls.values() if c.seq_id > kept[-1].seq_id)
        return [each for each in before if each not in kept and each.folder]

    def lose(self, snapshot: Snapshot) -> None:
        """Note that a snapshot turned out to be damaged."""
        self._snapshots.remove(snapshot)

    def calls_after(self, snapshot: Snapshot) -> list[SentCall]:
        """Return what to send, in this order, to a trainer that has loaded the snapshot."""
        calls = (self._calls[seq_id] for seq_id in sorted(self._calls))
        return [c for c in calls if snapshot.seq_id < c.seq_id <= self._answered]

    def answered_up_to(self, snapshot: Snapshot) -> int:
        """Return the newest `seq_id` that needs no delivery after those of `calls_after`."""
        return max(self._answered, snapshot.seq_id)

    def close(self) -> None:
        """Forget everything: the run has ended."""
        self._forget(list(self._calls.values()))

    def _keep_within_bounds(self) -> None:
        # What only the older snapshot needs goes first.
        for seq_id in (self.newest.seq_id, self._answered):
            if self.bytes > self._recovery.log_bytes or len(self._calls) > _MOST_CALLS:
                self._drop_up_to(seq_id)

    def _drop_up_to(self, seq_id: int) -> None:
        """Forget the calls up to this one; those of which no answer arrived are still needed."""
        calls = [c for c in self._calls.values() if c.answered and c.seq_id <= seq_id]
        self._forget(calls)
        # Not `seq_id`: it may be of an operation of which the trainer never heard.
        newest = max((call.seq_id for call in calls), default=-1)
        if newest > self.missing_to:
            after, self.missing_to = self.missing_to, newest
            self._dropped(after, newest, [call.seq_id for call in calls if call.has_payload])

    def _forget(self, calls: list[SentCall]) -> None:
        for call in calls:
            del self._calls[call.seq_id]
            self.bytes -= call.size
            if call.release is not None:
                call.release()
