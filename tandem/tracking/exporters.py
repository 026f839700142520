"""Exporters of metrics to other tools. They run in the user's process, with the user's keys."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from tandem.errors import UserError, describe
from tandem.tracking.outbox import MetricRow

_MOST_BYTES = 128 * 2**20
"""Waiting rows of one exporter, as they are in memory."""


class Exporter(Protocol):
    """A tool that gets all rows, in a thread of its own. An error ends the exporter only."""

    @property
    def name(self) -> str: ...
    def export_row(self, row: MetricRow) -> None: ...
    def close(self) -> None: ...


class ExporterThread:
    """Gives an exporter its rows, and then closes it. Problems go to `warn(kind, sentence)`.

    The thread begins here, because Python begins none while the program ends."""

    def __init__(self, exporter: Exporter, *, warn: Callable[[str, str], None]) -> None:
        self._exporter = exporter
        self._warn = warn
        self._rows: SimpleQueue[MetricRow | None] = SimpleQueue()
        self._bytes = 0
        self._counting = threading.RLock()  # a signal's handler may log, too
        self._thread = threading.Thread(target=self._work, name="tandem-exporter", daemon=True)
        self._thread.start()

    def put_row(self, row: MetricRow) -> None:
        if not self._thread.is_alive():  # it has failed, and nobody takes its rows
            return
        with self._counting:
            fits = self._bytes + row.size <= _MOST_BYTES
            self._bytes += row.size if fits else 0
        if fits:
            self._rows.put(row)
        else:
            self._tell("loses rows", "it is too slow")

    def begin_close(self) -> None:
        self._rows.put(None)

    def wait_closed(self, timeout: float) -> None:
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._tell("is not closed", "it takes too long")

    def _work(self) -> None:
        try:
            for row in iter(self._rows.get, None):
                with self._counting:
                    self._bytes -= row.size
                self._exporter.export_row(row)
        except Exception as error:  # noqa: BLE001 - another library must not end the program
            self._tell("gets no more rows", describe(error, typed=True))
        try:
            self._exporter.close()
        except Exception as error:  # noqa: BLE001 - as above
            self._tell("is not closed", describe(error, typed=True))

    def _tell(self, what: str, why: str) -> None:
        name = self._exporter.name
        self._warn(f"{what} {name}", f"{name} {what}: {why}")


@dataclass(frozen=True)
class TrackedIdentity:
    """The identity of a run for other tools."""

    run_id: str
    name: str
    tags: Sequence[str]
    config: Mapping[str, Any]

    @property
    def plain_id(self) -> str:
        """The id without `:`, which W&B does not take."""
        return self.run_id.replace(":", "-")


class WandbExporter:
    """Metrics in a run of W&B, which `WANDB_PROJECT`, `WANDB_MODE` and so on configure.

    An open run of this process (`wandb.run`) is used, and stays open."""

    name = "wandb"

    def __init__(self, identity: TrackedIdentity) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        self._opened = wandb.run is None
        self._run: Any = wandb.run or wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "tandem",
            id=identity.plain_id,
            resume="allow",
            name=identity.name or identity.run_id,
            tags=list(identity.tags),
            config=dict(identity.config),
        )
        self._defined: set[str] = set()

    def export_row(self, row: MetricRow) -> None:
        # W&B drops a row whose step is smaller than the last one. An axis of our own has no order.
        axis = "tandem/step" if row.source == "tandem" else "step"
        for name in row.values.keys() - self._defined:
            self._defined.add(name)
            self._run.define_metric(name, step_metric=axis)
        self._run.log({**row.values, axis: row.step})

    def close(self) -> None:
        if self._opened:
            self._run.finish()


class TensorBoardExporter:
    """Metrics as scalars in event files of a folder, by default `tensorboard/NAME`."""

    name = "tensorboard"

    def __init__(self, identity: TrackedIdentity, folder: Path | None = None) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._event, self._summary = Event, Summary
        safe = "".join(c if c.isalnum() or c in "._- " else "-" for c in identity.name).strip(" .")
        folder = folder or Path("tensorboard") / (safe or identity.plain_id)
        self._writer: Any = EventFileWriter(str(folder))

    def export_row(self, row: MetricRow) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value) for name, value in row.values.items()
        ]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=row.at, step=row.step, summary=summary))

    def close(self) -> None:
        self._writer.close()


EXPORTERS: Mapping[str, Callable[[TrackedIdentity], Exporter]] = {
    "wandb": WandbExporter,
    "tensorboard": TensorBoardExporter,
}


def make_exporters(to: Sequence[str | Exporter], identity: TrackedIdentity) -> list[Exporter]:
    """Raises `UserError` for an unknown name and a missing package."""
    to = [to] if isinstance(to, str) else to
    for name in to:
        if isinstance(name, str) and name not in EXPORTERS:
            raise UserError(f"there is no exporter {name!r}; known: {', '.join(EXPORTERS)}")
    return [EXPORTERS[each](identity) if isinstance(each, str) else each for each in to]


def _missing(package: str) -> UserError:
    return UserError(f"{package} is not installed; install it with `pip install tandem[{package}]`")
