"""A rank other than 0: `python -m trainer_service.rank`, started by rank 0.

It gets one line of JSON on standard input, which then stays open as its lifeline. It obeys
the operations that rank 0 broadcasts until it is killed, and if anything fails here it says
what, on the descriptor given, and ends: a process group that lost a member is of no use.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys

from tandem.worker import die_with_parent, hold_lifeline


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--report-fd", type=int, required=True)
    report_fd: int = parser.parse_args().report_fd
    die_with_parent()
    faulthandler.enable()
    # Rank 0 stops us. A signal to the whole group must not make it look as if we had died.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        from trainer_service.member import Assignment, join, obey  # loads torch while rank 0 does

        line = sys.stdin.buffer.readline()
        if not line:
            os._exit(1)
        hold_lifeline()
        assignment = Assignment.model_validate_json(line)
        obey(join(assignment))
    except BaseException as error:
        sentence = f"{type(error).__name__}: {error}".splitlines()[0]
        os.write(report_fd, sentence.encode()[:4000])
        raise


if __name__ == "__main__":
    main()
