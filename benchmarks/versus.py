"""`make bench-versus ARGS=OTHER_CHECKOUT`: this checkout beside another one, in one run.

Both stacks run at once and take turns, A B B A …. The result is the median of the ratios, pair by
pair."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import record
from tandem.demo.tiny_model import write_tiny_model

HERE = Path(__file__).resolve().parent
HIGHER_IS_BETTER = {
    "empty_operation_ms": False,
    "gateway_cpu_ms_per_empty_operation": False,
    "gateway_cpu_ms_per_32_mib": False,
    "gateway_cpu_ms_per_update": False,
    "forward_backward_tokens_per_second": True,
    "updates_per_second": True,
    "publish_to_served_seconds": False,
    "sampled_tokens_per_second": True,
    "short_samples_per_second": True,
}


class Running:
    """A probe in another checkout, asked over its standard streams."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def answer(self) -> object:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # the SDK prints its own lines
            try:
                return json.loads(line)
            except ValueError:
                continue
        raise RuntimeError("a probe ended; see what it printed above")

    def ask(self, measurement: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(measurement + "\n")
        self._process.stdin.flush()
        return float(str(self.answer()))


@contextmanager
def probe(checkout: Path, model: Path) -> Iterator[Running]:
    process = subprocess.Popen(
        [sys.executable, str(HERE / "probe.py"), str(model)],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), "TINKER_TELEMETRY": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        running = Running(process)
        assert running.answer() == "ready"
        yield running
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)


def commit_of(checkout: Path) -> str:
    answer = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    )
    return answer.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.versus", description=__doc__)
    parser.add_argument("other", type=Path, help="a checkout of another commit")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--only", nargs="*", choices=list(HIGHER_IS_BETTER), default=None)
    parser.add_argument("--no-save", action="store_true", help="only print")
    arguments = parser.parse_args()
    here, other = HERE.parent, arguments.other.resolve()
    console, rows = Console(width=140), []
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        model = Path(work) / "tiny"
        write_tiny_model(model, seed=0)
        ours = stack.enter_context(probe(here, model))
        theirs = stack.enter_context(probe(other, model))
        for name in arguments.only or HIGHER_IS_BETTER:
            ours.ask(name), theirs.ask(name)  # warm-up
            pairs = []
            for index in range(arguments.pairs):
                if index % 2:
                    second = theirs.ask(name)
                    pairs.append((ours.ask(name), second))
                else:
                    first = ours.ask(name)
                    pairs.append((first, theirs.ask(name)))
            ratios = sorted(a / b for a, b in pairs)
            rows.append(
                {
                    "measurement": name,
                    "better": "higher" if HIGHER_IS_BETTER[name] else "lower",
                    "here": round(statistics.median(a for a, _ in pairs), 4),
                    "other": round(statistics.median(b for _, b in pairs), 4),
                    "ratio, median": round(statistics.median(ratios), 3),
                    "ratio, range": f"{ratios[0]:.3f} – {ratios[-1]:.3f}",
                }
            )
            console.print(rows[-1])
    table = Table(*rows[0], title=f"{commit_of(here)} beside {commit_of(other)}")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)
    if not arguments.no_save:
        results = {
            "machine": record.machine(),
            "here": commit_of(here),
            "other": commit_of(other),
            "pairs": arguments.pairs,
            "versus": rows,
        }
        console.print(f"Written to {record.save(results).name}")


if __name__ == "__main__":
    main()
