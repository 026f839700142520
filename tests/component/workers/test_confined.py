from __future__ import annotations

import os
import subprocess
import sys

import pytest


def confined(device: str, then: str) -> str:
    """The output of a confined process with a second thread."""
    script = f"""
import os, threading
from tandem.protocol.devices import confine, parse_device
stop = threading.Event()
thread = threading.Thread(target=stop.wait, daemon=True)
thread.start()
try:
    confine(parse_device({device!r}))
except Exception as error:
    print(type(error).__name__, error)
{then}
"""
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True
    ).stdout.strip()


def test_all_threads_of_a_confined_process_have_its_cores():
    core = max(os.sched_getaffinity(0))
    said = confined(
        f"cpu:{core}",
        "print(os.sched_getaffinity(0), os.sched_getaffinity(thread.native_id))",
    )
    assert said == f"{{{core}}} {{{core}}}"


@pytest.mark.parametrize("more", ["9999", "{first},9999"])
def test_cores_that_the_machine_lacks_are_an_error_that_says_which_there_are(more):
    first = min(os.sched_getaffinity(0))
    said = confined(f"cpu:{more.format(first=first)}", "")
    assert said.startswith("WorkerStartFailed cpu:")
    assert "this process may run on the cores" in said


@pytest.mark.parametrize(("device", "visible"), [("cuda:3", "3"), ("cpu:0", "")])
def test_a_confined_process_sees_its_nvidia_device_alone(device, visible):
    assert confined(device, "print(os.environ['CUDA_VISIBLE_DEVICES'])") == visible
