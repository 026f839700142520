"""The runner: it claims trials of a gateway's playground, and trains them.

It is a client like others. Each trial's program gets the visitor's key, and has the trial's id as
the project of its sessions. The gateway hears of each program every few seconds. It gives the trial
of a silent runner to another one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import httpx

from tandem.agent.environment import inherited
from tandem.blueprints.catalog import blueprint_named
from tandem.blueprints.running import BlueprintResult, run_blueprint
from tandem.errors import describe
from tandem.protocol.own_machine import http_client

POLL_SECONDS = 1.0
_ROUTES = "api/tandem/v1/playground/claims"
_PATIENCE = 600.0
"""Seconds in which a gateway may be away before the end of a program is given up."""
_REQUEST_SECONDS = 30.0
_STOP_SECONDS = 15.0
"""A program has this time to end."""
_LONGEST_ERROR = 2000
"""Characters, as the gateway takes them."""
_NETWORK = ("NO_PROXY", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR", "TINKER_TELEMETRY")


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
        busy = list[threading.Thread]()
        away = False
        try:
            while not stop.is_set():
                busy = [each for each in busy if each.is_alive()]
                try:
                    claim = self._post("") if len(busy) < self.slots else {"trial": None}
                    away = False
                except (httpx.HTTPError, ValueError) as error:
                    if _is_refused(error):
                        raise
                    if not away:
                        self.say(f"the gateway does not answer: {describe(error)}")
                    claim, away = {"trial": None}, True
                if claim["trial"] is None:
                    stop.wait(POLL_SECONDS)
                    continue
                trial = claim["trial"]
                busy.append(
                    threading.Thread(
                        target=self._train, args=(trial, claim["key"], stop), name=trial["id"]
                    )
                )
                busy[-1].daemon = True  # its program ends with it
                busy[-1].start()
        finally:
            stop.set()
            for each in busy:
                each.join(_STOP_SECONDS)

    def _train(self, trial: Mapping[str, Any], key: str, stop: threading.Event) -> None:
        name, attempt = f"{trial['id']} of {trial['owner']}", {"attempt": trial["attempt"]}
        self.say(f"{name} trains {trial['blueprint']} with {trial['model']}")
        try:
            result = run_blueprint(
                blueprint_named(trial["blueprint"]),
                model=trial["model"],
                values=trial["values"],
                seed=trial["seed"],
                environment=_environment(self.url, key, trial["id"]),
                timeout=_seconds_of(trial),
                goes_on=partial(self._goes_on, trial["id"], attempt, stop),
            )
            end = _end_of(result)
        except Exception as error:  # noqa: BLE001 - the visitor must hear of it
            end = {"error": describe(error, typed=True)[:_LONGEST_ERROR]}
        if stop.is_set():
            return
        self.say(f"{name} ended{': ' if end.get('error') else ''}{end.get('error', '')}")
        self._report(trial["id"], attempt | end, stop)

    def _goes_on(self, trial_id: str, attempt: dict[str, int], stop: threading.Event) -> bool:
        if stop.is_set():
            return False
        try:
            return bool(self._post(f"/{trial_id}", attempt)["goes_on"])
        except (httpx.HTTPError, ValueError) as error:
            # While a gateway restarts, the program's own requests wait for it, too.
            return not _is_refused(error)

    def _report(self, trial_id: str, end: dict[str, Any], stop: threading.Event) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not stop.is_set():
            try:
                self._post(f"/{trial_id}/end", end)
                return
            except (httpx.HTTPError, ValueError) as error:
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


def _environment(url: str, key: str, trial_id: str) -> dict[str, str]:
    """Return the environment of a program, without the secrets of the runner's own."""
    return {
        **inherited(os.environ),
        **{name: os.environ[name] for name in _NETWORK if name in os.environ},
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": key,
        "TINKER_PROJECT_ID": trial_id,
    }


def _seconds_of(trial: Mapping[str, Any]) -> float:
    """Return the whole time of a trial."""
    begin, end = (datetime.fromisoformat(trial[name]) for name in ("started_at", "ends_at"))
    return (end - begin).total_seconds()


def _end_of(result: BlueprintResult) -> dict[str, Any]:
    return {
        "error": result.error[:_LONGEST_ERROR],
        "numbers": dict(result.numbers),
        "violations": dict(result.violations),
        "weights": result.weights,
    }


def _is_refused(error: Exception) -> bool:
    """Return whether a repetition would be refused too."""
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 408
