"""`make test-cluster`: starts a control plane from given binaries, runs the tests, keeps artefacts.

`KUBECONFIG` names a cluster, or `TANDEM_TEST_BINARIES` a folder with `kind`, or with `etcd` and
`kube-apiserver`. All takes at most 20 minutes. Further arguments go to pytest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.cluster import settings
from tests.cluster.control_plane import ControlPlane, StartFailed, started
from tests.support.processes import end_at_signal

MOST_SECONDS = 1080.0
"""The control plane stops within two more minutes."""
_STARTS_WITHIN = 240.0
_ENDS_WITHIN = 150.0
"""Seconds for interrupted tests to delete their namespaces."""
_NOTHING_RAN = 5  # pytest: no tests were collected


def main(
    arguments: Sequence[str],
    *,
    tests: Sequence[str] = (sys.executable, "-m", "pytest", "-n0", "tests/cluster"),
    most_seconds: float = MOST_SECONDS,
) -> int:
    """Return the status of the tests, 1 after a failed start, and 124 if the time was over.

    After an interruption it is 130."""
    began = time.monotonic()
    artefacts = settings.ARTEFACTS or Path("runs") / time.strftime("cluster-%Y%m%d-%H%M%S")
    artefacts.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "TANDEM_TEST_ARTEFACTS": str(artefacts.resolve())}
    if not settings.KUBECONFIG and not settings.BINARIES:
        print("neither KUBECONFIG nor TANDEM_TEST_BINARIES is set: all tests are skipped")
    with ExitStack() as stack:
        if settings.BINARIES and not settings.KUBECONFIG:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cluster-")))
            deadline = began + min(_STARTS_WITHIN, most_seconds)
            try:
                plane = stack.enter_context(
                    started(
                        settings.BINARIES,
                        work,
                        artefacts,
                        images=settings.images_of_the_machine(),
                        deadline=deadline,
                    )
                )
            except StartFailed as error:
                print(error, file=sys.stderr)
                print(f"artefacts: {artefacts}")
                return 1
            environment |= variables_of(plane)
            print(f"the control plane is ready after {time.monotonic() - began:.0f} s", flush=True)
        command = [*tests, f"--junit-xml={artefacts / 'report.xml'}", *arguments]
        status = run_tests(command, environment, seconds=began + most_seconds - time.monotonic())
    print(f"artefacts: {artefacts}, after {time.monotonic() - began:.0f} s")
    return status


def variables_of(plane: ControlPlane) -> dict[str, str]:
    nodes = {"TANDEM_TEST_NODES": "1" if plane.has_nodes else "0"}
    devices = {"TANDEM_TEST_DEVICE_CLASS": settings.DEVICE_CLASS_OF_OWN_NODES}
    return {"KUBECONFIG": str(plane.kubeconfig), **nodes, **devices}


def run_tests(command: Sequence[str], environment: dict[str, str], *, seconds: float) -> int:
    """Run the tests. Interrupt them when the time is nearly over, or with us, to clean up."""
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    ends_within = min(_ENDS_WITHIN, seconds / 4)
    try:
        status = process.wait(timeout=seconds - ends_within)
        return 0 if status == _NOTHING_RAN else status
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
        print(f"the tests are interrupted: {type(reason).__name__}", flush=True)
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=ends_within)
        return 124 if isinstance(reason, subprocess.TimeoutExpired) else 130
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=60)


if __name__ == "__main__":
    end_at_signal()
    sys.exit(main(sys.argv[1:]))
