from __future__ import annotations

import subprocess
import sys

from tandem.protocol.process_use import UseMeter
from tests.support.waiting import wait_until

COMPUTE = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"


def test_the_computing_of_children_counts():
    meter = UseMeter(())
    child = subprocess.Popen([sys.executable, "-c", f"{COMPUTE}input()"], stdin=subprocess.PIPE)
    try:

        def has_counted() -> bool:
            meter.measure()
            return meter.use.cpu_seconds >= 0.3

        wait_until(has_counted)
    finally:
        child.communicate(b"\n", timeout=10)
    meter.measure()  # the end of the child takes nothing back
    assert meter.use.cpu_seconds >= 0.3
