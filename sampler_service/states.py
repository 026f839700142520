"""The states of an engine, and the moves between them that are allowed."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from tandem.errors import IllegalTransition


class State(Enum):
    AWAKE = "awake"
    LOADING = "loading"
    FAILED = "failed"


ALLOWED: dict[State, frozenset[State]] = {
    State.AWAKE: frozenset({State.LOADING, State.FAILED}),
    State.LOADING: frozenset({State.AWAKE, State.FAILED}),
    State.FAILED: frozenset(),
}


class StateMachine:
    """Holds a state and refuses illegal moves. `on_change` hears each new state."""

    def __init__(
        self, initial: State = State.AWAKE, *, on_change: Callable[[State], None] = lambda _: None
    ) -> None:
        self._state = initial
        self._on_change = on_change

    @property
    def state(self) -> State:
        return self._state

    def move(self, to: State) -> None:
        """Raises `IllegalTransition` when there is no such move."""
        if to not in ALLOWED[self._state]:
            raise IllegalTransition(f"a sampler that is {self._state.value} cannot be {to.value}")
        self._state = to
        self._on_change(to)
