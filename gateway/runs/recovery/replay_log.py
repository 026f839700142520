"""The replay log: a run's snapshots and later calls, from which a new trainer is restored.

Calls that changed the trainer's state stay until two snapshots cover them, because the newest may
be damaged. The journal's rows hold equal data for the next gateway. See `docs/design/recovery.md`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import NonNegativeFloat, TypeAdapter, ValidationError

from gateway.runs.operations import STATE_CHANGES, Body, Kind
from tandem.errors import CheckpointDamaged, CustomLossFailed, InvalidRequest
from tandem.settings.gateway import GatewaySettings
from tandem.v1 import trainer_pb2

METADATA_KEY = "tandem.recovery"
VARIABLE_FAILURES = frozenset({CheckpointDamaged.type, CustomLossFailed.type})
"""Failures that a replay may not repeat: they depend on the disk or the machine's load."""
_SECONDS: TypeAdapter[float] = TypeAdapter(NonNegativeFloat)
_GENERATIONS = 2
_MANY_CALLS = 5000
"""Calls that trigger a snapshot, however short they were."""
REPLAY_SECONDS = 60.0
LOG_BYTES = 2**30
_MOST_CALLS = 100_000
_BYTES_PER_SECOND = 2e8
"""Assumed write speed of the first snapshot."""
_NEARLY = 0.75
"""Share of the log's bytes that counts as nearly full. Half of them trigger a snapshot."""
_LARGEST_SHARE = 0.25
"""Largest share of training time for snapshots, even if a replay then takes longer."""


@dataclass(frozen=True)
class Recovery:
    """How a run's dead trainer is restored.

    Snapshots take the `share` of training time. `replay` bounds the seconds to replay, unless
    snapshots would take a quarter of the time. `log_bytes` bounds stored payloads."""

    share: float = 0.02
    replay: float = REPLAY_SECONDS
    log_bytes: int = LOG_BYTES


def recovery_of(
    user_metadata: Mapping[str, object] | None, settings: GatewaySettings
) -> Recovery | None:
    """Return a run's recovery, None if its death is final. Its creator may turn it off or bound the
    replay in seconds: `{"tandem.recovery": "off"}`, `{"tandem.recovery": "600"}`. Raises
    `InvalidRequest`."""
    chosen = (user_metadata or {}).get(METADATA_KEY, REPLAY_SECONDS)
    if chosen == "off":
        return None
    try:
        replay = _SECONDS.validate_python(chosen)
    except ValidationError as error:
        raise InvalidRequest(
            f'{METADATA_KEY} of the user_metadata is {str(chosen)[:40]!r}: it is "off", or the '
            "seconds of training that are replayed at most after a crash"
        ) from error
    if not settings.recovery_enabled:
        return None
    return Recovery(share=settings.recovery_share, replay=replay, log_bytes=LOG_BYTES)


@dataclass(frozen=True)
class Snapshot:
    """A trainer's state after the operation `seq_id`. Without a `folder`, it is the initial state.
    `bytes` is its size."""

    seq_id: int = -1
    step: int = 0
    folder: str = ""
    bytes: int = 0


@dataclass(eq=False)
class SentCall:
    """A call sent to the trainer. `request` is its message without the payload (in the journal if
    `has_payload`) and the loss definition in `body`. `size` includes the payload. `is_early`: the
    trainer is done with it, but must repeat it if it dies before the answer counts. An `answered`
    call took `seconds` and has a `failure` ("" for none) with a `reason`. `release` is called when
    it is forgotten."""

    seq_id: int
    kind: Kind
    request: bytes = b""
    body: Body | None = None
    size: int = 0
    has_payload: bool = False
    is_early: bool = False
    answered: bool = False
    seconds: float = 0.0
    failure: str = ""
    reason: str = ""
    release: Callable[[], None] | None = None

    @property
    def changes_state(self) -> bool:
        return self.kind in STATE_CHANGES

    @property
    def changes_weights(self) -> bool:
        return self.kind in ("optim_step", "load_weights") and not self.failure

    @property
    def is_replayed(self) -> bool:
        """Whether a replay sends it. A failure with a temporary cause is not repeated; see
        `leaves_incomplete`."""
        return self.failure not in VARIABLE_FAILURES

    @property
    def leaves_incomplete(self) -> str:
        """Why gradients are incomplete after its failure, "" if unknown."""
        if self.kind == "forward_backward":
            return self.reason
        header = trainer_pb2.LoadCheckpointRequest.FromString(self.request).header
        return header.gradients_incomplete


class ReplayLog:
    """The calls that a restored trainer needs. `dropped` gets the `seq_id` range of unneeded calls
    and the numbers of those with a payload. `missing_to` is the newest dropped call."""

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
        """Seconds of the trainer's work since the newest snapshot: the length of a replay."""

    @property
    def complete(self) -> bool:
        """Whether all calls after the newest snapshot exist, so that the run can be restored."""
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
        return [each for each in reversed(self._snapshots) if each.seq_id >= self.missing_to]

    @property
    def first_unanswered(self) -> SentCall | None:
        return min(
            (call for call in self._calls.values() if not (call.answered or call.is_early)),
            key=lambda call: call.seq_id,
            default=None,
        )

    @property
    def newest_change(self) -> int:
        """The newest operation in the trainer's state, -1 for none."""
        answered = [call.seq_id for call in self._calls.values() if call.answered]
        return max([self.missing_to, self.newest.seq_id, *answered])

    def held(self, seq_id: int) -> SentCall | None:
        return self._calls.get(seq_id)

    def resume(
        self,
        *,
        snapshots: Sequence[Snapshot],
        calls: Sequence[SentCall],
        missing_to: int,
        answered: int,
    ) -> None:
        """Continue an earlier log: its `snapshots`, oldest first, and its later calls."""
        self._snapshots.extend(snapshots)
        if len(snapshots) >= _GENERATIONS or missing_to >= 0:
            self._snapshots.popleft()
        self._calls = {call.seq_id: call for call in calls}
        self.missing_to, self._answered = missing_to, answered
        self.bytes = sum(call.size for call in calls)
        self.work = sum(call.seconds for call in calls if call.seq_id > self.newest.seq_id)

    def note_sent(self, call: SentCall) -> None:
        """Note a call before its sending. Above the bounds, drop calls before the newest snapshot,
        if needed all answered ones."""
        self._calls[call.seq_id] = call
        self.bytes += call.size
        self._keep_within_bounds()

    def note_answered(
        self, seq_id: int, *, seconds: float, failure: str = "", reason: str = ""
    ) -> None:
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
        """Return whether the work since the newest snapshot justifies another of about this
        size."""
        cost = self._cost_of(expected_bytes)
        latest = max(self._recovery.replay, cost / _LARGEST_SHARE)
        return (
            not self.complete
            or self.work >= min(cost / self._recovery.share, latest)
            or self.bytes >= self._recovery.log_bytes / 2
            or len(self._calls) >= _MANY_CALLS
        )

    def is_worth_snapshot(self, *, expected_bytes: int) -> bool:
        """Return whether a snapshot costs less than a replay of the work that it would cover."""
        changes = [c.seq_id for c in self._calls.values() if c.answered and c.changes_weights]
        upto = max(changes, default=-1)
        after = self.newest.seq_id
        work = sum(c.seconds for c in self._calls.values() if after < c.seq_id <= upto)
        return not self.complete or work > self._cost_of(expected_bytes)

    def _cost_of(self, expected_bytes: int) -> float:
        return self._cost if self._cost is not None else expected_bytes / _BYTES_PER_SECOND

    def add_snapshot(self, snapshot: Snapshot, *, cost: float | None = None) -> list[Snapshot]:
        """Add a snapshot, which took `cost` seconds if it was requested. Return superfluous
        ones."""
        if cost is not None:
            self._cost = cost
        # A snapshot before a missing call is useless.
        useful = [each for each in self._snapshots if each.seq_id >= self.missing_to]
        useful = sorted([*useful, snapshot], key=lambda each: each.seq_id)
        kept, before = useful[-_GENERATIONS:], [*self._snapshots, snapshot]
        self._snapshots = deque(kept)
        self._drop_up_to(kept[0].seq_id)
        self.work = sum(c.seconds for c in self._calls.values() if c.seq_id > kept[-1].seq_id)
        return [each for each in before if each not in kept and each.folder]

    def lose(self, snapshot: Snapshot) -> None:
        self._snapshots.remove(snapshot)

    def calls_after(self, snapshot: Snapshot) -> list[SentCall]:
        """Return the calls, in order, for a trainer that has loaded the snapshot."""
        calls = (self._calls[seq_id] for seq_id in sorted(self._calls))
        newer = [c for c in calls if snapshot.seq_id < c.seq_id <= self._answered]
        return [call for call in newer if call.changes_state]

    def answered_up_to(self, snapshot: Snapshot) -> int:
        """Return the newest `seq_id` covered by the snapshot and `calls_after`."""
        return max(self._answered, snapshot.seq_id)

    def close(self) -> None:
        self._forget(list(self._calls.values()))

    def _keep_within_bounds(self) -> None:
        # Drop calls that only the older snapshot needs first.
        for seq_id in (self.newest.seq_id, self._answered):
            if self.bytes > self._recovery.log_bytes or len(self._calls) > _MOST_CALLS:
                self._drop_up_to(seq_id)

    def _drop_up_to(self, seq_id: int) -> None:
        calls = [c for c in self._calls.values() if c.answered and c.seq_id <= seq_id]
        self._forget(calls)
        # Not `seq_id`, which the trainer may never have received.
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
