"""A worker for the launcher's tests: `python dummy_worker.py BEHAVIOUR --report-fd N`.

It performs only the handshake."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

from tandem.protocol.worker import WorkerReport, WorkerSpec
from tandem.protocol.worker_link import LauncherLink, launcher_link

ADDRESS = WorkerReport(address="127.0.0.1:1", metrics_port=2)
ERROR = WorkerReport(error_type="worker_died", error="rank 1 was killed by SIGKILL")


async def serve(spec: WorkerSpec, link: LauncherLink, *, ready: bool) -> None:
    from prometheus_client import CollectorRegistry

    from tandem.protocol.worker_server import WorkerServer

    server = WorkerServer(spec)
    link.report(await server.listen(CollectorRegistry()))
    await server.set_serving(ready)
    await server.grpc.wait_for_termination()


def main(behaviour: str, arguments: list[str]) -> None:
    link = launcher_link(arguments)
    link.preload(lambda: print("preloaded", file=sys.stderr))
    spec = link.read_spec()
    link.hold_lifeline()
    match behaviour:
        case "crash":
            print(f"Traceback …\nOSError: no such model (said with {spec.secret})", file=sys.stderr)
            sys.exit(3)
        case "fault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "refuse":
            link.report(ERROR)
            sys.exit(1)
        case "refuse-and-stay":
            link.report(ERROR)
        case "silent":
            pass
        case "serve":
            asyncio.run(serve(spec, link, ready=True))
        case "never-ready":
            asyncio.run(serve(spec, link, ready=False))
        case "garbage":
            report_fd = int(arguments[1])
            os.write(report_fd, b'\xff\x00 no report\n{"address": 7}\n[]\n\n' + b"x" * 3_000_000)
            os.write(report_fd, b"\n")
            link.report(ADDRESS)
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            link.report(ADDRESS)
        case "polite":
            signal.signal(signal.SIGTERM, lambda *_: (print("goodbye"), sys.exit(0)))
            link.report(ADDRESS)
        case "family":
            child = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            child += "print('up', flush=True)\nwhile True: signal.pause()"
            started = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
            started.stdout.readline()
            print(f"child {started.pid}")
            link.report(ADDRESS)
        case "complain-on-signal":
            signal.signal(signal.SIGUSR1, lambda *_: (link.report(ERROR), os._exit(1)))
            link.report(ADDRESS)
        case "complain-and-stay-on-signal":
            signal.signal(signal.SIGUSR1, lambda *_: link.report(ERROR))
            link.report(ADDRESS)
        case "environment":
            print(sorted(os.environ), os.environ["PYTHONUNBUFFERED"])
            print(sys.argv)
            link.report(ADDRESS)
        case _:
            raise ValueError(behaviour)
    while True:
        time.sleep(0.1)  # short, so that a signal just before it is noticed


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
