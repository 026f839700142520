"""Runs a sampler: `python -m sampler_service --report-fd N` (see `tandem/protocol/worker.py`)."""

from __future__ import annotations

import sys

from sampler_service.vllm.environment import restart_with_environment


def main() -> None:
    restart_with_environment(sys.argv[1:])

    from sampler_service.service.process import run  # imports libraries that read the environment

    run()


if __name__ == "__main__":
    main()
