"""Check that a demo's run directory shows the promised results: `check_demo.py DIR`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

REWARD_LAST, GREEDY = 0.995, 1.0


def main() -> int:
    directory = Path(sys.argv[1])
    summary = json.loads((directory / "summary.json").read_text())
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    print(json.dumps(summary, indent=1))
    problems = []
    if [step["step"] for step in steps] != list(range(1, 11)):
        problems.append("metrics.jsonl does not hold the ten steps")
    if summary["reward_last"] < REWARD_LAST:
        problems.append(f"the last mean reward {summary['reward_last']} is below {REWARD_LAST}")
    if summary["greedy"] < GREEDY:
        problems.append(f"greedy answers are right in {summary['greedy']:.0%} of all cases only")
    if len({step["weight_version"] for step in steps}) != len(steps):
        problems.append("some steps did not sample from new weights")
    if not (directory / "reward.png").stat().st_size:
        problems.append("the chart is empty")
    for problem in problems:
        print(f"check_demo: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
