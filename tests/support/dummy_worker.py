"""A worker for the launcher's tests: `python dummy_worker.py BEHAVIOUR --report-fd N`.

It speaks the launcher's side of the protocol for real (specification, lifeline, report,
gRPC health with the secret) and does nothing else.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

from tandem.worker import (
    SECRET_METADATA_KEY,
    WorkerReport,
    WorkerSpec,
    hold_lifeline,
    read_spec,
    send_report,
)


async def serve(spec: WorkerSpec, report_fd: int, *, ready: bool) -> None:
    import grpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    async def refuse(request, context):
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call lacks the secret")

    class AsksForSecret(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, details):
            if (SECRET_METADATA_KEY, spec.secret) not in details.invocation_metadata:
                return grpc.unary_stream_rpc_method_handler(refuse)
            return await continuation(details)

    status = health_pb2.HealthCheckResponse
    servicer = health.aio.HealthServicer()
    await servicer.set("", status.NOT_SERVING)
    server = grpc.aio.server(interceptors=[AsksForSecret()])
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    report(report_fd, port)
    if ready:
        await servicer.set("", status.SERVING)
    await server.wait_for_termination()


def report(report_fd: int, port: int = 1) -> None:
    address = f"127.0.0.1:{port}"
    send_report(report_fd, WorkerReport(address=address, metrics_port=2, pid=os.getpid()))


def complain(report_fd: int) -> None:
    error = "rank 1 was killed by SIGKILL"
    send_report(report_fd, WorkerReport(error_type="worker_died", error=error))


def main(behaviour: str, report_fd: int) -> None:
    spec = read_spec()
    hold_lifeline()
    match behaviour:
        case "crash":
            print(f"Traceback …\nOSError: no such model (said with {spec.secret})", file=sys.stderr)
            sys.exit(3)
        case "fault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "refuse":
            complain(report_fd)
            sys.exit(1)
        case "refuse-and-stay":
            complain(report_fd)
        case "silent":
            pass
        case "serve":
            asyncio.run(serve(spec, report_fd, ready=True))
        case "never-ready":
            asyncio.run(serve(spec, report_fd, ready=False))
        case "garbage":
            os.write(report_fd, b'\xff\x00 no report\n{"address": 7}\n[]\n\n' + b"x" * 3_000_000)
            os.write(report_fd, b"\n")
            report(report_fd)
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            report(report_fd)
        case "polite":
            signal.signal(signal.SIGTERM, lambda *_: (print("goodbye"), sys.exit(0)))
            report(report_fd)
        case "family":
            child = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            child += "print('up', flush=True)\nwhile True: signal.pause()"
            started = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
            started.stdout.readline()
            print(f"child {started.pid}")
            report(report_fd)
        case "complain-on-signal":
            signal.signal(signal.SIGUSR1, lambda *_: (complain(report_fd), os._exit(1)))
            report(report_fd)
        case "complain-and-stay-on-signal":
            signal.signal(signal.SIGUSR1, lambda *_: complain(report_fd))
            report(report_fd)
        case "environment":
            print(sorted(os.environ), os.environ["PYTHONUNBUFFERED"])
            print(sys.argv)
            report(report_fd)
        case _:
            raise ValueError(behaviour)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[3]))
