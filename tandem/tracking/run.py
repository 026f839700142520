"""`TrackedRun`: the record of a run, as the user's loop sees it."""

from __future__ import annotations

import atexit
import os
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from typing import Any, Self
from urllib.parse import quote

import httpx

from tandem.errors import UserError, describe
from tandem.protocol.own_machine import http_client
from tandem.tracking.exporters import Exporter, ExporterThread, TrackedIdentity, make_exporters
from tandem.tracking.outbox import IdentityChange, Item, MetricRow, Outbox, RolloutRows
from tandem.tracking.sender import RecordSender, Warnings
from tandem.tracking.values import as_number, snapshot

_BUFFER_BYTES = 128 * 2**20
_BATCH_BYTES = 2**20
_IDENTITY_SECONDS = _EXIT_SECONDS = 10.0
_CLOSE_SECONDS = 5.0
"""The least time of the exporters, also after a silent gateway."""


class TrackedRun:
    """Sends metrics and rollouts of one run in the background.

    Only `flush` and `finish` wait for the network. None raises in the loop: a lost value costs one
    warning (logger `tandem.track`). Unsent rows wait in a buffer of 128 MiB, which drops its
    oldest rows.

    After a fork, the child's rows are sent by a thread of its own, without exporters. The parent
    alone sends the rows from before the fork."""

    def __init__(
        self,
        run_id: str,
        *,
        url: str,
        connect: Callable[[], httpx.Client],
        exporters: Sequence[Exporter] = (),
        buffer_bytes: int = _BUFFER_BYTES,
    ) -> None:
        self.run_id = run_id
        self.url = f"{url}/runs/{quote(run_id, safe=':')}"
        """The run's page."""
        self._connect = connect
        self._warnings = Warnings()
        warn = self._warnings.warn_once
        self._exporters = [ExporterThread(each, warn=warn) for each in exporters]
        self._buffer_bytes = buffer_bytes
        self._finished = False
        self._begin()
        atexit.register(self.finish, timeout=_EXIT_SECONDS)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lost = 0
        self._outbox = Outbox(limit=self._buffer_bytes)
        self._sender = RecordSender(
            self.run_id,
            outbox=self._outbox,
            client=self._connect(),
            exporters=self._exporters,
            warnings=self._warnings,
        )
        self._sender.thread.start()

    @property
    def dropped(self) -> int:
        """Lost rows: pushed out of the buffer, or not taken by the gateway."""
        return self._lost + self._sender.dropped

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record numbers of a step. The newest value of a name and step counts.

        A number is a float, an integer, or a scalar of numpy, torch or JAX. NaN and infinities are
        kept."""
        number = self._whole_step(step)
        if number is None or not isinstance(values, Mapping):
            self._warnings.warn_once("log", "run.log takes a step and a dict of numbers")
            return
        numbers: dict[str, float] = {}
        for name, value in values.items():
            if (taken := as_number(value)) is None:
                kind = type(value).__name__
                self._warnings.warn_once(f"value {name}", f"metric {name!r} is no number: {kind}")
            else:
                numbers[str(name)] = taken
        if numbers:
            row = MetricRow(step=number, at=time.time(), values=numbers)
            self._put(row)
            for exporter in self._exporters:
                exporter.put_row(row)

    def rollouts(
        self, step: int, rollouts: Iterable[Mapping[str, Any]], *, sample: float = 1.0
    ) -> None:
        """Record rollouts of a step: dicts with any fields.

        The page knows prompt, answer, reward, advantage, and the lists tokens, logprobs and
        advantages [tokens]. `sample` is the recorded share. The choice depends only on the step
        and the position, so a repeated run records the same ones."""
        number = self._whole_step(step)
        if number is None or not isinstance(rollouts, Iterable):
            self._warnings.warn_once("rollouts", "run.rollouts takes a step and a list of dicts")
            return
        batch: list[Mapping[str, Any]] = []
        size = 0
        for position, rollout in enumerate(rollouts):
            if sample < 1 and zlib.crc32(f"{number}:{position}".encode()) >= sample * 2**32:
                continue
            try:
                fields, bytes_ = snapshot(dict(rollout))
            except Exception as error:  # noqa: BLE001 - a record must not end a training loop
                sentence = f"a rollout is no dict of plain values: {describe(error, typed=True)}"
                self._warnings.warn_once("rollout", sentence)
                continue
            if batch and size + bytes_ > _BATCH_BYTES:
                self._put(RolloutRows(number, uuid.uuid4().hex, batch, size))
                batch, size = [], 0
            batch.append(fields)
            size += bytes_
        if batch:
            self._put(RolloutRows(number, uuid.uuid4().hex, batch, size))

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until all rows are sent. Returns whether they were within `timeout` seconds."""
        return self._outbox.drain(timeout) == 0

    def finish(self, timeout: float = 30.0) -> None:
        """Send the last rows and close the exporters. Rows unsent after `timeout` s are lost.

        Exporters have 5 s to close if less than that is left. The end of the program does the same,
        within 10 s and these 5 s."""
        if self._finished or os.getpid() != self._pid:
            return
        self._finished = True
        atexit.unregister(self.finish)
        deadline = time.monotonic() + timeout
        if unsent := self._outbox.drain(timeout, close=True):
            self._lost += unsent
            self._warnings.warn_once("unsent", f"{unsent} rows of {self.run_id} were not sent")
        self._sender.thread.join(max(0.0, deadline - time.monotonic()))
        for exporter in self._exporters:
            exporter.begin_close()
        deadline = max(deadline, time.monotonic() + _CLOSE_SECONDS)
        for exporter in self._exporters:
            exporter.wait_closed(max(0.0, deadline - time.monotonic()))

    def set_identity(self, fields: Mapping[str, Any]) -> None:
        """Change `name`, `tags` or `config`. No fields only check that the run exists.

        Raises the gateway's refusal. A silent gateway costs a warning, and gets them later."""
        change = IdentityChange(fields)
        self._outbox.put(change)
        self._outbox.drain(_IDENTITY_SECONDS)
        if change.answered.done():
            change.answered.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def _whole_step(self, step: Any) -> int | None:
        try:
            number = index(step)
        except TypeError:
            number = -1
        if 0 <= number < 2**53:
            return number
        self._warnings.warn_once("step", f"a step is a whole number from 0, not {step!r}")
        return None

    def _put(self, item: Item) -> None:
        if os.getpid() != self._pid:  # after a fork, neither thread nor lock can be used
            self._exporters, self._warnings = [], Warnings()
            self._begin()
        if dropped := self._outbox.put(item):
            self._lost += dropped
            state = "finished, and takes" if self._finished else "full of unsent rows, and loses"
            self._warnings.warn_once(state, f"the record of {self.run_id} is {state} rows")


def track(
    policy: Any,
    *,
    name: str | None = None,
    tags: Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    to: Sequence[str | Exporter] = (),
    url: str | None = None,
    api_key: str | None = None,
) -> TrackedRun:
    """Name a run and record its metrics and rollouts, in the background.

    `policy` is a `tinker.TrainingClient`, or the id of a run. With an id, `url` and `api_key` are
    by default TINKER_BASE_URL and TINKER_API_KEY. `config["total_steps"]` makes the progress known.
    `to` has `"wandb"`, `"tensorboard"` or an `Exporter`. Raises a `UserError` for the gateway's
    refusal, and for a missing package. docs/tracking.md has examples."""
    run_id = policy if isinstance(policy, str) else getattr(policy, "model_id", None)
    if not run_id:
        raise UserError("tandem.track takes a TrainingClient or the id of a run")
    # The SDK has no public names for its address and key.
    holder = getattr(policy, "holder", None)
    url = url or getattr(holder, "_base_url", None) or os.environ.get("TINKER_BASE_URL")
    key = api_key or getattr(holder, "_api_key", None) or os.environ.get("TINKER_API_KEY")
    if not url or not key:
        raise UserError(
            "tandem.track needs the gateway's address and key: set TINKER_BASE_URL and "
            "TINKER_API_KEY, or pass url and api_key"
        )
    base, headers = str(url).rstrip("/"), {"X-API-Key": key}
    identity = TrackedIdentity(str(run_id), name or "", tuple(tags or ()), dict(config or {}))
    run = TrackedRun(
        identity.run_id,
        url=base,
        connect=lambda: http_client(f"{base}/api/tandem/v1/", headers=headers, timeout=30),
        exporters=make_exporters(to, identity),
    )
    given = {"name": name, "tags": tags, "config": config}
    try:
        run.set_identity({field: value for field, value in given.items() if value is not None})
    except BaseException:
        run.finish(timeout=0)
        raise
    return run
