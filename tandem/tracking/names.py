"""Names of metrics and configuration values, for command line and page."""

from __future__ import annotations

from collections.abc import Iterable

SERVER = "tandem/"
"""The beginning of the names of the server's metrics."""
_MAIN = ("reward", "loss")


def main_metric(names: Iterable[str]) -> str:
    """Return the metric that best tells how a run does, "" without any: a reward before a loss,
    the user's before the server's, and a short name before a longer one.

    Capitals do not matter."""
    known = sorted(names)
    ranks = [
        (rank, name.startswith(SERVER), len(name), name)
        for name in known
        for parts in (name.lower().split("/"),)
        for rank, word in enumerate(_MAIN)
        if word in parts or parts[-1].rpartition("_")[2] == word
    ]
    if ranks:
        return min(ranks)[-1]
    return next((name for name in known if not name.startswith(SERVER)), "")


def flat(config: object, prefix: str = "") -> dict[str, object]:
    """Return a configuration's values by dotted name: `{"optimizer.lr": 0.001}`."""
    if not isinstance(config, dict) or (not config and prefix):
        return {prefix: config}
    found: dict[str, object] = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found
