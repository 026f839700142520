"""Blueprints in a notebook: run one, and read the curves of its runs.

The gateway is that of TINKER_BASE_URL, with the key TINKER_API_KEY."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.blueprints.catalog import blueprint_named
from tandem.blueprints.description import Value
from tandem.blueprints.running import BlueprintResult, run_blueprint
from tandem.errors import UserError
from tandem.protocol.own_machine import http_client


def run(
    name: str,
    *,
    model: str = "",
    seed: int = 0,
    folders: Sequence[Path] = (),
    timeout: float | None = None,
    **values: Value,
) -> BlueprintResult:
    """Train the blueprint `name` with `values` of its parameters, as `tandem blueprint run` does.

    Raises `UserError` before the start for a wrong name, model or value."""
    blueprint = blueprint_named(name, folders)
    chosen = blueprint.values_of(values)
    known = [each["name"] for each in _get("models")["models"]]
    return run_blueprint(
        blueprint,
        model=blueprint.chosen_model(known, asked=model),
        values=chosen,
        seed=seed,
        environment=os.environ,
        timeout=timeout,
    )


def curve(result: BlueprintResult, metric: str) -> dict[int, float]:
    """Return the values of a metric by step, of the last run that recorded it."""
    names: set[str] = set()
    for run_id in reversed(result.runs):
        found = _get(f"runs/{run_id}/metrics")["metrics"]
        if metric in found:
            return dict(zip(found[metric]["step"], found[metric]["value"], strict=True))
        names |= found.keys()
    known = ", ".join(sorted(names)) or "none"
    raise UserError(f"no run of {result.blueprint} recorded {metric}; recorded: {known}")


def _get(path: str) -> dict[str, Any]:
    url, key = os.environ.get("TINKER_BASE_URL"), os.environ.get("TINKER_API_KEY")
    if not url or not key:
        raise UserError("set TINKER_BASE_URL and TINKER_API_KEY, which `tandem up` prints")
    address = f"{url.rstrip('/')}/api/tandem/v1/"
    with http_client(address, headers={"X-API-Key": key}) as client:
        found: dict[str, Any] = client.get(path).raise_for_status().json()
        return found
