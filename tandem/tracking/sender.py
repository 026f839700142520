"""The daemon thread that sends an outbox to the gateway, and gets the server's rows."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

import httpx
import orjson

from tandem.errors import InvalidRequest, TandemError, describe, from_type
from tandem.tracking.exporters import ExporterThread
from tandem.tracking.outbox import IdentityChange, Item, MetricRow, Outbox, RolloutRows
from tandem.tracking.values import as_json_number, encoded, from_json_number

_LINGER_SECONDS = 1.0
_FIRST_PAUSE, _LONGEST_PAUSE, _HURRIED_PAUSE = 0.5, 30.0, 0.25
_RETRIED = {408, 429}
"""Statuses that mean "later", besides all from 500. Every other refusal is final."""
_OF_ONE_ROW = {400, 413, 422}
_MOST_WARNINGS = 50

_logger = logging.getLogger("tandem.track")


class Warnings:
    """Logs each kind of warning once."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def warn_once(self, kind: str, sentence: str) -> None:
        if kind not in self._given and len(self._given) < _MOST_WARNINGS:
            self._given.add(kind)
            _logger.warning("%s", sentence)

    def forget(self, kind: str) -> None:
        self._given.discard(kind)


class RecordSender:
    """Sends one run's items in order, each until the gateway stores or refuses it.

    `client` belongs to `/api/tandem/v1/`. Only the thread uses it."""

    def __init__(
        self,
        run_id: str,
        *,
        outbox: Outbox,
        client: httpx.Client,
        exporters: Sequence[ExporterThread],
        warnings: Warnings,
    ) -> None:
        self._run_id = run_id
        self._path = f"runs/{quote(run_id, safe=':')}"
        self._outbox = outbox
        self._client = client
        self._exporters = exporters
        self._warnings = warnings
        self._cursor = "0"  # the beginning
        self._pause = self._retry_at = 0.0
        self.dropped = 0
        """Rows that the gateway did not take."""
        self.thread = threading.Thread(target=self._work, name="tandem-track", daemon=True)

    def _work(self) -> None:
        with self._client:
            while self._outbox.has_work():
                self._guarded(self._send_waiting)
            if self._exporters and not self._outbox.abandoned:
                self._guarded(lambda: self._deliver([]))  # the answer has the server's last rows

    def _guarded(self, work: Callable[[], object]) -> None:
        """Try again later after an error, also an unexpected one, which must not end the thread."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - all are warned about
            known = isinstance(error, TandemError | httpx.HTTPError)
            self._retry_later(describe(error, typed=not known))

    def _send_waiting(self) -> None:
        self._outbox.pause(_LINGER_SECONDS, hurried=0)
        if time.monotonic() >= self._retry_at or self._outbox.hurried:
            while (items := self._outbox.oldest()) and not self._outbox.abandoned:
                self._deliver(items)

    def _deliver(self, items: Sequence[Item]) -> None:
        """Send items until they are stored, or refused for good. Raises any error, for a time when
        they must be sent again."""
        try:
            method, path, content = self._request(items)
        except Exception as error:  # noqa: BLE001 - a value of the user's may raise anything
            self._refuse(items, InvalidRequest(f"it is no JSON: {describe(error)}"))
            return
        headers = {"Content-Type": "application/json"}
        answer = self._client.request(method, path, content=content, headers=headers)
        if answer.is_server_error or answer.status_code in _RETRIED:
            raise _refusal(answer)
        if answer.status_code in _OF_ONE_ROW and len(items) > 1:
            for item in items:
                self._deliver([item])
            return
        if answer.is_error:
            self._refuse(items, _refusal(answer))
            return
        if not isinstance(told := answer.json(), dict):
            raise TypeError(f"it answered with a {type(told).__name__}, not an object")
        try:
            if items and isinstance(items[0], IdentityChange):
                items[0].answered.set_result(None)
            else:
                self._read_reply(told)
        finally:  # the gateway has them, whatever it says
            self._outbox.remove(items)
        self._pause = self._retry_at = 0.0
        self._warnings.forget("unreachable")

    def _request(self, items: Sequence[Item]) -> tuple[str, str, bytes]:
        """Return method, path and body. Raises any error of a value."""
        first = items[0] if items else None
        if isinstance(first, IdentityChange):
            return "PATCH", self._path, encoded(first.fields)
        if isinstance(first, RolloutRows):
            head = orjson.dumps({"batch": first.batch, "step": first.step})[:-1]
            rollouts = b",".join(encoded(each) for each in first.rollouts)
            return "POST", f"{self._path}/rollouts", b'%b,"rollouts":[%b]}' % (head, rollouts)
        rows = [_as_json(row) for row in items if isinstance(row, MetricRow)]
        after = f"?server_after={self._cursor}" if self._exporters else ""
        return "POST", f"{self._path}/metrics{after}", encoded({"rows": rows})

    def _read_reply(self, told: dict[str, Any]) -> None:
        if dropped := told.get("dropped", 0):
            self.dropped += dropped
            sentence = f"the gateway dropped {dropped} rows of {self._run_id}: {told.get('why')}"
            self._warnings.warn_once("dropped", sentence)
        self._cursor = told.get("server_cursor", self._cursor)
        for row in map(_server_row, told.get("server_rows", [])):
            for exporter in self._exporters:
                exporter.put_row(row)

    def _refuse(self, items: Sequence[Item], error: TandemError) -> None:
        if items and isinstance(items[0], IdentityChange):
            items[0].answered.set_exception(error)
        else:
            rows = sum(item.rows for item in items)
            self.dropped += rows
            self._warnings.warn_once(
                f"refused {error.type}",
                f"the gateway refused {rows} rows of {self._run_id}: {error.message}",
            )
        self._outbox.remove(items)

    def _retry_later(self, why: str) -> None:
        self._warnings.warn_once(
            "unreachable", f"the record of {self._run_id} waits for the gateway: {why}"
        )
        self._pause = min(max(2 * self._pause, _FIRST_PAUSE), _LONGEST_PAUSE)
        self._retry_at = time.monotonic() + self._pause
        if self._outbox.hurried:
            self._outbox.pause(0, hurried=_HURRIED_PAUSE)


def _as_json(row: MetricRow) -> dict[str, Any]:
    values = {name: as_json_number(value) for name, value in row.values.items()}
    return {"step": row.step, "at": row.at, "values": values}


def _server_row(row: dict[str, Any]) -> MetricRow:
    values = {name: from_json_number(value) for name, value in row["values"].items()}
    return MetricRow(step=row["step"], at=row["at"], values=values, source="tandem")


def _refusal(answer: httpx.Response) -> TandemError:
    """Return the gateway's error. A proxy's page becomes an `InternalError`."""
    try:
        body = answer.json()
        return from_type(body["type"], body["error"])
    except (ValueError, KeyError, TypeError):
        return from_type("", f"status {answer.status_code} of {answer.request.url.host}")
