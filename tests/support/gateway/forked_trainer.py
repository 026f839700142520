"""A trainer in a forked process. The import of this module does a trainer's imports."""

from __future__ import annotations

from multiprocessing.connection import Connection

from tandem.protocol.worker import WorkerReport, WorkerSpec
from trainer_service.__main__ import serve
from trainer_service.service.libraries import import_libraries, set_environment

set_environment()
import_libraries()


class _Link:
    def __init__(self, reports: Connection) -> None:
        self._reports = reports

    def hold_lifeline(self) -> None:
        """Do nothing: the process is a daemon of the test."""

    def report(self, report: WorkerReport) -> None:
        self._reports.send_bytes(report.model_dump_json().encode())


def serve_trainer(spec: WorkerSpec, reports: Connection) -> None:
    serve(spec, _Link(reports))
