"""The goals on an H100 or H200, and the measured numbers beside them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True)
class Goal:
    """A number of a part, and its bounds. `number` is the path of its keys. Of several numbers, the
    largest counts. Without bounds, it is only shown."""

    size: str
    part: str
    number: tuple[str, ...]
    at_most: float | None = None
    at_least: float | None = None

    @property
    def bound(self) -> str:
        if self.at_most is not None:
            return f"<= {self.at_most:,}"
        return "" if self.at_least is None else f">= {self.at_least:,}"

    def measured(self, results: Mapping[str, object]) -> float | None:
        found: object = results
        for key in (self.size, self.part, *self.number):
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, list):
            found = max(found, default=None)
        return found if isinstance(found, int | float) else None

    def met(self, measured: float | None) -> bool | None:
        """None: there is no goal or no measurement."""
        if measured is None or not self.bound:
            return None
        if self.at_most is not None:
            return measured <= self.at_most
        return self.at_least is not None and measured >= self.at_least


_TO_FIRST_TOKEN = "published_to_first_token_seconds"
GOALS = (
    Goal("1.5B", "serving", ("handoff", _TO_FIRST_TOKEN), at_most=0.10),
    Goal("1.5B", "serving", ("files", _TO_FIRST_TOKEN), at_most=1.2),
    Goal("8B", "serving", ("files", _TO_FIRST_TOKEN), at_most=2.0),
    Goal("1.5B", "training", ("compiled trainer", "2048 tokens", "mfu"), at_least=0.50),
    Goal("1.5B", "training", ("compiled trainer", "4096 tokens", "mfu"), at_least=0.50),
    Goal(
        "4B", "training", ("compiled trainer", "16384 tokens", "tokens_per_second"), at_least=10_000
    ),
    Goal("1.5B", "joint", ("of_one_run",), at_least=0.9),
    Goal("1.5B", "joint", ("of_one_run_with_steps",)),
    Goal("1.5B", "recovery", ("seconds_until_the_next_result",), at_most=5.0),
    Goal("1.5B", "recovery", ("pause_seconds",)),
    Goal("1.5B", "starts", ("engine", "idle_process_seconds"), at_most=12.0),
    Goal("1.5B", "starts", ("trainer", "idle_process_seconds"), at_most=3.0),
    Goal("1.5B", "trainers", ("sleep_of_copies",), at_least=0.8),
    Goal("1.5B", "trainers", ("wake_of_copies",), at_least=0.8),
    Goal("1.5B", "trainers", ("device_bytes_left",), at_most=2**30),
    Goal("1.5B", "trainers", ("suspended", "suspend_seconds")),
    Goal("1.5B", "trainers", ("suspended", "resume_seconds")),
    Goal("8B", "serving", ("sleep level 1", "switch_seconds"), at_most=0.8),
    Goal("1.5B", "wakes", ("wakes",), at_least=50),
    Goal("1.5B", "wakes", ("left_percent",), at_most=5.0),
    Goal("0.5B", "engines", ("reload_seconds",)),
    Goal("1.5B", "engines", ("reload_seconds",)),
    Goal("1.5B", "together", ("makespan_over_serial",)),
    Goal("1.5B", "sampling", ("of_vllm_alone",), at_least=0.95),
)


def judged(
    results: Mapping[str, object], chosen: Collection[tuple[str, str]]
) -> list[dict[str, object]]:
    """Return the goals of the chosen sizes and parts, with their numbers in the results.

    None: not measured."""
    rows: list[dict[str, object]] = []
    for goal in GOALS:
        if (goal.size, goal.part) not in chosen:
            continue
        measured = goal.measured(results)
        rows.append(
            {
                "size": goal.size,
                "part": goal.part,
                "number": ", ".join(goal.number),
                "measured": measured,
                "goal": goal.bound,
                "met": goal.met(measured),
            }
        )
    return rows


def goal_table(rows: Sequence[Mapping[str, object]]) -> Table:
    table = Table("size", "part", "number", "measured", "goal", "met", title="Goals")
    words = {True: "yes", False: "NO", None: ""}
    for row in rows:
        measured, met = row["measured"], row["met"]
        shown = f"{measured:,.3f}" if isinstance(measured, float) else measured
        table.add_row(
            *(str(row[name]) for name in ("size", "part", "number")),
            "not measured" if shown is None else str(shown),
            str(row["goal"]),
            words[met if isinstance(met, bool) else None],
        )
    return table
