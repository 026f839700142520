"""`python -m tests.chaos --faults 150 --seed 1 --ranks 2`: exit status 1 where a run differed."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from tests.chaos.chaos import run_chaos


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=150)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        struck = run_chaos(
            Path(folder),
            faults=arguments.faults,
            seed=arguments.seed,
            ranks=arguments.ranks,
            tell=lambda line: print(line, flush=True),
        )
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for each in struck:
        seconds[each.what].append(each.seconds)
    for what, found in sorted(seconds.items()):
        middle = statistics.median(found)
        print(f"{what}: {len(found)} times, median {middle:.1f} s, at most {max(found):.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
