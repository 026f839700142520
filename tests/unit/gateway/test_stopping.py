"""What a gateway does when it is asked to stop. No process is started here."""

from __future__ import annotations

import signal

from gateway.stopping import Stop


def asked(*numbers: int) -> Stop:
    """What a gateway was asked for by these signals, one after the other."""
    stop = Stop()
    for again, number in enumerate(numbers):
        stop.ask(number, again=bool(again))
    return stop


def test_sigterm_hands_the_workers_over_and_sigint_stops_them():
    assert asked(signal.SIGTERM) == Stop(hand_over=True)
    assert asked(signal.SIGINT) == asked() == Stop()


def test_a_second_sigint_ends_the_waiting_and_a_second_sigterm_changes_nothing():
    assert asked(signal.SIGINT, signal.SIGTERM) == Stop()
    assert asked(signal.SIGINT, signal.SIGINT) == Stop(at_once=True)
    assert asked(signal.SIGINT, signal.SIGINT, signal.SIGTERM) == Stop(at_once=True)
