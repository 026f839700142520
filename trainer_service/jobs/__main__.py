"""`python -m trainer_service.jobs`: the worker of a job."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry

from tandem.errors import StorageFailed, TandemError, WorkerStartFailed, describe, without_paths
from tandem.protocol.devices import confine, devices_of_ranks, together
from tandem.protocol.worker import JobSpec, WorkerReport, WorkerSpec
from tandem.protocol.worker_link import LauncherLink, launcher_link
from tandem.protocol.worker_server import WorkerServer
from tandem.telemetry import configure_logging, get_log
from trainer_service.jobs.end import write_end
from trainer_service.jobs.runner import JobProcess

_ERROR_FILE = "error.json"
"""torchrun writes the error of the first failed rank here."""


def main() -> None:
    link = launcher_link()
    link.preload(lambda: None)
    spec = link.read_spec()
    link.hold_lifeline()
    configure_logging(service="job", level=spec.log_level)
    log = get_log(worker_id=spec.worker_id, session_id=spec.session_id)
    try:
        asyncio.run(_serve(spec, _started(spec), link))
    except Exception as error:
        if isinstance(error, TandemError):
            fault = error
        else:
            fault = WorkerStartFailed(describe(error, typed=True))
        log.error("job_failed", exc_info=error, error=fault.message)
        link.report(WorkerReport.of_error(fault))
        sys.exit(1)


def _started(spec: WorkerSpec) -> JobProcess:
    """Start torchrun, before this process has other threads that hold locks. Raises
    `WorkerStartFailed` and `StorageFailed`."""
    if (job := spec.job) is None:
        raise WorkerStartFailed("its specification has no job")
    if devices := devices_of_ranks(spec.devices, ranks=job.processes):
        confine(together(devices))
    folder = _attempt_folder(job)
    try:
        folder.mkdir(exist_ok=True)
        (folder / _ERROR_FILE).unlink(missing_ok=True)
    except OSError as error:
        reason = without_paths(describe(error))
        raise StorageFailed(f"the job's folder cannot be used: {reason}") from error
    return JobProcess(job, error_file=folder / _ERROR_FILE, stop_timeout=spec.stop_timeout)


def _attempt_folder(job: JobSpec) -> Path:
    return Path(job.folder) / f"attempt-{job.attempt}"


async def _serve(spec: WorkerSpec, job: JobProcess, link: LauncherLink) -> None:
    """Serve health until the job has ended. Raises `StorageFailed`."""
    server = WorkerServer(spec)
    try:
        link.report(await server.listen(CollectorRegistry()))
        await server.set_serving(True)
        end = await job.ended()
    finally:
        job.kill()
    assert spec.job is not None
    try:
        write_end(_attempt_folder(spec.job), end)
    except OSError as error:
        reason = without_paths(describe(error))
        raise StorageFailed(f"the end of the job cannot be written: {reason}") from error
    await server.stop_serving(0.0)


if __name__ == "__main__":
    main()
