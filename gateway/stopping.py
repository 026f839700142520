"""How a gateway ends that was asked to: it leaves its workers to the next one, or stops them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Stop:
    """What a gateway was asked for by a signal; unless it was, it stops its workers.

    `hand_over`: its workers go on, for the next gateway. `at_once`: it was asked again, and waits
    for nothing. `tell` says what it waits for, to whoever asked.
    """

    hand_over: bool = False
    at_once: bool = False
    tell: Callable[[str], None] = lambda sentence: None

    def ask(self, number: int, *, again: bool) -> None:
        """Note a signal: SIGTERM, from a supervisor that starts another gateway, or SIGINT."""
        if again:
            self.at_once = self.at_once or number == signal.SIGINT
        else:
            self.hand_over = number == signal.SIGTERM
