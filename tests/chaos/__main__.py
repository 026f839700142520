"""`python -m tests.chaos --faults 150 --seed 1 --ranks 2`: exit status 1 if a run differed."""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path

from tests.chaos.chaos import run_chaos
from tests.chaos.experiments import KINDS
from tests.support.stacks import GROUPS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=150)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--ranks", type=int, default=1, help="of each trainer")
    parser.add_argument("--experiments", default="full,rl", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--only", default="", help="parts of the names of faults, with commas")
    parser.add_argument("--groups", choices=GROUPS, default="none", help="that they share")
    parser.add_argument("--share", action="store_true", help="LoRA runs share a trainer")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    logging.getLogger("tinker").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)  # load_state is deprecated, and part of the SDK
    began = time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True)

    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        struck = run_chaos(
            folder,
            faults=arguments.faults,
            seed=arguments.seed,
            ranks=arguments.ranks,
            kinds=arguments.experiments.split(","),
            only=arguments.only.split(",") if arguments.only else (),
            groups=GROUPS[arguments.groups],
            share=arguments.share,
            tell=tell,
        )
    except BaseException:
        print(f"seed {arguments.seed}; logs and database are in {folder}", flush=True)
        raise
    shutil.rmtree(folder)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for each in struck:
        seconds[each.what].append(each.seconds)
    for what, found in sorted(seconds.items()):
        middle = statistics.median(found)
        print(f"{what}: {len(found)} times, median {middle:.1f} s, at most {max(found):.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
