"""`python -m sampler_service --report-fd N`: the sampler as a process (see `tandem/worker.py`)."""

from __future__ import annotations

import sys
from argparse import ArgumentParser

from sampler_service.environment import restart_with_environment


def main() -> None:
    parser = ArgumentParser(prog="sampler_service")
    parser.add_argument("--report-fd", type=int, required=True)
    arguments = parser.parse_args()
    restart_with_environment(sys.argv[1:])

    from sampler_service.process import run  # only now: it imports what the environment shapes

    sys.exit(run(report_fd=arguments.report_fd))


if __name__ == "__main__":
    main()
