"""The runner: it claims trials of a gateway's playground, and trains them.

It is a client like others. Each trial's program gets the visitor's key, and has the trial's id as
the project of its sessions. The gateway hears of each program every few seconds. It gives the trial
of a silent runner to another one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import httpx

from tandem.blueprints.catalog import blueprint_named
from tandem.blueprints.running import BlueprintResult, run_blueprint
from tandem.errors import TandemError, describe
from tandem.protocol.own_machine import http_client

POLL_SECONDS = 1.0
_ROUTES = "api/tandem/v1/playground/claims"
_PATIENCE = 600.0
"""Seconds in which a gateway may be away before the end of a program is given up."""
_REQUEST_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class BlueprintRunner:
    """`slots` programs train at once. `key` is an administrator's. `say` gets a line about each
    trial."""

    url: str
    key: str
    slots: int
    say: Callable[[str], None]

    def run_trials(self, stop: threading.Event) -> None:
        """Claim and train trials until `stop` is set. Programs that train then are killed, and
        their trials wait again. Raises `httpx.HTTPStatusError` for a key without the right."""
        busy = set[Future[None]]()
        away = ""
        with ThreadPoolExecutor(self.slots, thread_name_prefix="trial") as pool:
            try:
                while not stop.is_set():
                    busy = {each for each in busy if not each.done()}
                    claim: dict[str, Any] | None = None
                    try:
                        claim = self._post("") if len(busy) < self.slots else None
                        away = ""
                    except httpx.HTTPError as error:
                        if _is_refused(error):
                            raise
                        if not away:
                            self.say(f"the gateway does not answer: {describe(error)}")
                        away = describe(error)
                    if claim is not None and claim["trial"] is not None:
                        busy.add(pool.submit(self._train, claim["trial"], claim["key"], stop))
                    else:
                        stop.wait(POLL_SECONDS)
            finally:
                stop.set()

    def _train(self, trial: Mapping[str, Any], key: str, stop: threading.Event) -> None:
        name, attempt = f"{trial['id']} of {trial['owner']}", {"attempt": trial["attempt"]}
        self.say(f"{name} trains {trial['blueprint']} with {trial['model']}")
        try:
            result = run_blueprint(
                blueprint_named(trial["blueprint"]),
                model=trial["model"],
                values=trial["values"],
                seed=trial["seed"],
                environment={
                    "TINKER_BASE_URL": self.url,
                    "TINKER_API_KEY": key,
                    "TINKER_PROJECT_ID": trial["id"],
                },
                timeout=_seconds_of(trial),
                goes_on=partial(self._goes_on, trial["id"], attempt, stop),
            )
            end = _end_of(result)
        except (TandemError, OSError) as error:
            end = {"error": describe(error)}
        if stop.is_set():
            return
        self.say(f"{name} ended{': ' if end.get('error') else ''}{end.get('error', '')}")
        self._report(trial["id"], attempt | end, stop)

    def _goes_on(self, trial_id: str, attempt: dict[str, int], stop: threading.Event) -> bool:
        if stop.is_set():
            return False
        try:
            return bool(self._post(f"/{trial_id}", attempt)["goes_on"])
        except httpx.HTTPError:
            return True  # a restarting gateway. The program's own requests wait for it, too

    def _report(self, trial_id: str, end: dict[str, Any], stop: threading.Event) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not stop.is_set():
            try:
                self._post(f"/{trial_id}/end", end)
                return
            except httpx.HTTPError as error:
                if time.monotonic() > deadline or _is_refused(error):
                    self.say(f"the end of {trial_id} is not reported: {describe(error)}")
                    return
            stop.wait(POLL_SECONDS)

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        headers = {"X-API-Key": self.key}
        with http_client(self.url, headers=headers, timeout=_REQUEST_SECONDS) as client:
            answer = client.post(f"{_ROUTES}{path}", json=body).raise_for_status()
            found: dict[str, Any] = answer.json()
            return found


def _seconds_of(trial: Mapping[str, Any]) -> float:
    """Return the whole time of a trial."""
    begin, end = (datetime.fromisoformat(trial[name]) for name in ("started_at", "ends_at"))
    return (end - begin).total_seconds()


def _end_of(result: BlueprintResult) -> dict[str, Any]:
    return {
        "error": result.error[:2000],
        "numbers": dict(result.numbers),
        "violations": dict(result.violations),
        "weights": result.weights,
    }


def _is_refused(error: httpx.HTTPError) -> bool:
    """Return whether a repetition would be refused too."""
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 408
