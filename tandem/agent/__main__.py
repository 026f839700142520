"""`python -m tandem.agent --data-dir DATA`: the agent in the foreground."""

from __future__ import annotations

import os

# Both are read when grpc is imported. Workers are started by fork, and gRPC's handlers for a child
# that goes on with it start threads there; a child that becomes another program needs none.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

import argparse
import sys
from pathlib import Path

from tandem.agent.service import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    sys.exit(run(parser.parse_args().data_dir.resolve()))
