"""The demo's output: a live table, a chart and four files."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tandem.rl.report import StepReport, Tracked

_COLUMNS = ("step", "reward", "loss", "tokens/s", "sample s", "train s", "sync s")


class StepRow(TypedDict):
    """A step in the table and in `metrics.jsonl`. `loss` is that of the last optimizer step. The
    publication of `seconds_sync` is the one before the step."""

    step: int
    reward_mean: float
    loss: float
    tokens_per_second: float
    seconds_sample: float
    seconds_train: float
    seconds_sync: float
    learning_rate: float
    weight_version: str


def row_of(report: StepReport, *, learning_rate: float, weight_version: str) -> StepRow:
    """Describe a step that sampled from `weight_version`."""
    seconds = report.seconds
    return {
        "step": report.step,
        "reward_mean": report.reward,
        "loss": report.metrics["loss:sum"],
        "tokens_per_second": report.tokens / seconds["waiting"],
        "seconds_sample": seconds["waiting"],
        "seconds_train": seconds["training"],
        "seconds_sync": seconds["sync"],
        "learning_rate": learning_rate,
        "weight_version": weight_version,
    }


class LiveTable:
    """A table with a row per step, redrawn on a terminal, plain lines elsewhere."""

    def __init__(self, *, console: Console, title: str) -> None:
        self._console = console
        self._table = Table(title=title, title_justify="left")
        for name in _COLUMNS:
            self._table.add_column(name, justify="right")
        self._live = Live(self._table, console=console, auto_refresh=False)
        self._title = title

    def __enter__(self) -> LiveTable:
        if self._console.is_terminal:
            self._live.start(refresh=True)
        else:
            self._console.print(self._title, soft_wrap=True)
            self._print_line(_COLUMNS)
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def add_step(self, row: StepRow) -> None:
        cells = (
            str(row["step"]),
            f"{row['reward_mean']:.4f}",
            f"{row['loss']:+.4f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['seconds_sample']:.2f}",
            f"{row['seconds_train']:.2f}",
            f"{row['seconds_sync']:.3f}",
        )
        if self._console.is_terminal:
            self._table.add_row(*cells)
            self._live.update(self._table, refresh=True)
        else:
            self._print_line(cells)

    def _print_line(self, cells: Sequence[str]) -> None:
        self._console.print("".join(f"{cell:>10}" for cell in cells), soft_wrap=True)


class WarmUpProgress:
    """Prints a line per tenth of the steps. `record` gets all numbers."""

    def __init__(self, *, console: Console, steps: int, record: Tracked) -> None:
        self._console = console
        self._record = record
        self._steps = steps
        self._started = time.monotonic()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._record.log(step, values)
        tenth_before = (step - 1) * 10 // self._steps
        if step * 10 // self._steps > tenth_before:
            seconds = time.monotonic() - self._started
            self._console.print(
                f"Warm-up on imperfect examples: {step} of {self._steps} steps, "
                f"loss {values['loss']:.3f}, {seconds:.0f} s",
                soft_wrap=True,
            )

    def rollouts(self, step: int, rollouts: Sequence[Mapping[str, object]]) -> None:
        """Supervised training has none."""


class RunDirectory:
    """The files of a run: `metrics.jsonl`, `summary.json`, `config.json`, `answers.json`,
    `reward.png`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._metrics = path / "metrics.jsonl"
        self._metrics.write_text("")

    def write_json(self, name: str, content: object) -> None:
        (self.path / name).write_text(json.dumps(content, indent=1, default=str))

    def add_step(self, row: StepRow) -> None:
        with self._metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def draw_rewards(self, rewards: Sequence[float], *, title: str) -> None:
        """Plot the mean reward against the step, as `reward.png`."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        steps = range(1, len(rewards) + 1)
        figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120, layout="constrained")
        axes.plot(steps, rewards, marker="o", color="#2563eb", linewidth=2)
        for step in {1, len(rewards)}:
            axes.annotate(
                f"{rewards[step - 1]:.3f}",
                (step, rewards[step - 1]),
                textcoords="offset points",
                xytext=(0, -16),
                ha="center",
            )
        axes.set(xlabel="step", ylabel="mean reward of 800 samples", ylim=(0, 1.05), title=title)
        axes.set_xticks(list(steps))
        axes.grid(alpha=0.3)
        figure.savefig(self.path / "reward.png")
        pyplot.close(figure)
