from __future__ import annotations

from structlog.testing import capture_logs

from gateway.metrics import Metrics
from gateway.owners.counted_lines import CountedLines


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.metrics = Metrics()
        self.refused = CountedLines(
            self.metrics.refused_keys,
            first="key_refused",
            more="keys_refused",
            clock=lambda: self.now,
        )

    def burst(self, count: int, reason: str = "unauthenticated") -> None:
        for number in range(count):
            self.refused.note(reason=reason, address=f"203.0.113.{number}", path="/api/v1/models")

    def counted(self) -> float:
        return sum(
            sample.value
            for metric in self.metrics.refused_keys.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        )


def test_a_burst_of_refused_keys_is_two_log_lines_that_count_all_of_it():
    world = World()
    with capture_logs() as lines:
        world.burst(900)
        world.burst(100, reason="token_refused")
        world.refused.write()
        world.now = 61
        world.refused.write()
    first, rest = lines
    assert (first["event"], first["address"]) == ("key_refused", "203.0.113.0")
    assert rest["event"] == "keys_refused"
    assert (rest["count"], rest["seconds"]) == (999, 61)
    assert rest["reasons"] == {"unauthenticated": 899, "token_refused": 100}
    assert 0 < len(rest["addresses"]) <= 10
    assert world.counted() == 1000


def test_refusals_that_go_on_are_one_line_a_minute_and_a_later_one_is_logged_at_once():
    world = World()
    with capture_logs() as lines:
        for minute in range(1, 4):
            world.burst(50)
            world.now = 60.0 * minute
            world.refused.write()
        assert [line.get("count", 1) for line in lines] == [1, 49, 50, 50]
        world.now = 240.0
        world.refused.write()
        assert len(lines) == 4, "a quiet minute has no line"
        world.now = 500.0
        world.burst(1)
    assert (lines[4]["event"], len(lines)) == ("key_refused", 5)


def test_a_gateway_that_closes_still_logs_what_it_has_counted():
    world = World()
    with capture_logs() as lines:
        world.burst(7)
        world.refused.write(closing=True)
    assert [line.get("count", 1) for line in lines] == [1, 6]
