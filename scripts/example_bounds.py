"""Run the examples with several seeds, and write examples/bounds.json.

    python -m scripts.example_bounds --seeds 5 [NAME …]

TINKER_BASE_URL is a gateway with the models `my/model` and `my/chat` of examples/README.md. A bound
is the worst value of all seeds, and the values' spread beyond it. A tighter known bound stays."""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BOUNDS = ROOT / "examples" / "bounds.json"
DIRECTIONS: dict[str, dict[str, tuple[str, float]]] = {
    "sft": {"last loss": ("at_most", 0.2)},
    "dpo": {"margin": ("at_least", 0.3), "accuracy": ("at_least", 0.2)},
    "grpo_arithmetic": {"gain": ("at_least", 0.15), "greedy": ("at_least", 0.2)},
    "async_grpo": {"gain": ("at_least", 0.15), "oldest": ("at_most", 0.0)},
    "tool_use": {"gain": ("at_least", 0.05)},
    "openai_agent": {"gain": ("at_least", 0.3)},
    "resume": {"difference": ("at_most", 0.0)},
}
"""The numbers of each example that have a bound, with its side and its least margin."""

Sides = dict[str, dict[str, float]]
"""The bounds by number and side: `at_least` or `at_most`."""


def results_of(output: str) -> dict[str, float]:
    """Return the numbers of an example's last line, with the gain of the reward."""
    found: dict[str, float] = ast.literal_eval(output.strip().splitlines()[-1])
    if "last reward" in found:
        found["gain"] = found["last reward"] - found["first reward"]
    return found


def broken_bounds(bounds: Sides, found: dict[str, float]) -> list[str]:
    """Return the names of the numbers that violate their bounds."""
    return [
        name
        for name, sides in bounds.items()
        if not sides.get("at_least", -1e9) <= found[name] <= sides.get("at_most", 1e9)
    ]


def measured(name: str, seeds: int) -> dict[str, Any]:
    runs: list[dict[str, float]] = []
    seconds: list[float] = []
    for seed in range(seeds):
        began = time.monotonic()
        command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--seed", str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
        seconds.append(round(time.monotonic() - began, 1))
        runs.append(results_of(done.stdout))
        print(name, seed, seconds[-1], runs[-1], flush=True)
    bounds: Sides = {}
    for number, (side, least) in DIRECTIONS[name].items():
        values = [run[number] for run in runs]
        worst = min(values) if side == "at_least" else max(values)
        margin = max(max(values) - min(values), least)
        bound = worst - margin if side == "at_least" else worst + margin
        bounds[number] = {side: round(bound, 4)}
    values_of = {number: [round(run[number], 4) for run in runs] for number in runs[0]}
    return {"bounds": bounds, "values": values_of, "seconds": seconds}


def tighter(known: Sides, measured: Sides) -> Sides:
    """Return the tighter bound of each number: new values never loosen one."""
    choose = {"at_least": max, "at_most": min}
    return {
        number: {
            side: choose[side](bound, known.get(number, {}).get(side, bound))
            for side, bound in sides.items()
        }
        for number, sides in measured.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(DIRECTIONS))
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    for name in asked.names:
        found = measured(name, asked.seeds)
        known = json.loads(BOUNDS.read_text()) if BOUNDS.exists() else {}
        before = known.get(name, {}).get("bounds", {})
        known[name] = {**found, "bounds": tighter(before, found["bounds"])}
        BOUNDS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
