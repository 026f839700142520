"""`python -m sampler_service --report-fd N` runs a sampler (see `tandem/worker.py`)."""

from __future__ import annotations

import sys
from argparse import ArgumentParser

from sampler_service.vllm.environment import restart_with_environment


def main() -> None:
    parser = ArgumentParser(prog="sampler_service")
    parser.add_argument("--report-fd", type=int, required=True)
    arguments = parser.parse_args()
    restart_with_environment(sys.argv[1:])

    from sampler_service.service.process import run  # imports what the environment configures

    sys.exit(run(report_fd=arguments.report_fd))


if __name__ == "__main__":
    main()
