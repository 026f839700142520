"""Runs the agent in the foreground: `python -m tandem.agent --data-dir DATA`.

`--listen HOST:PORT` and its companions serve the gateway of another host."""

from __future__ import annotations

import os

# grpc reads both at its import. Its fork handlers start threads, and workers, which are forked and
# then executed, do not need them.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

import argparse
import sys
from pathlib import Path
from socket import gethostname

from tandem.agent.service import Listening, run
from tandem.protocol.worker import end_with_supervisor

if __name__ == "__main__":
    end_with_supervisor()
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--listen", default="", metavar="HOST:PORT")
    parser.add_argument("--advertise", default="", metavar="NAME")
    parser.add_argument("--tls", type=Path, metavar="DIR")
    parser.add_argument("--logs", type=Path, metavar="DIR")
    chosen = parser.parse_args()
    if chosen.listen and chosen.tls is None:
        parser.error("--listen needs --tls: an agent starts programs")
    listening = None
    if chosen.listen:
        listening = Listening(
            address=chosen.listen,
            advertised=chosen.advertise or gethostname(),
            tls=chosen.tls,
            logs=chosen.logs,
        )
    sys.exit(run(chosen.data_dir.resolve(), listening=listening))
