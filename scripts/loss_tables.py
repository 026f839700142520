"""Write the tables of docs/training.md from the registry of losses.

It replaces the lines between `<!-- table: NAME -->` and `<!-- end -->`. The rest of the page is
written by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from trainer_service.losses import CORRECTIONS, LOSSES, Setting
from trainer_service.losses.base import AGGREGATION_SETTINGS
from trainer_service.losses.policy import CORRECTION_SETTINGS, KL_SETTINGS

PAGE = Path(__file__).parents[1] / "docs" / "training.md"
SHARED: dict[str, tuple[Setting, ...]] = {
    "aggregation": AGGREGATION_SETTINGS,
    "KL": KL_SETTINGS,
    "corrections": CORRECTION_SETTINGS,
}
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""A head, and rows of as many cells."""
SETTING_HEAD = ("setting", "default", "meaning")
SHAPES = {
    "entry": "",
    "datum": ". Shape [1]",
    "either": ". Also of shape [1]",
    "free": ". Any shape",
}
"""The end of an input's meaning, by its shape: most inputs have the shape of the targets."""
_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """Return the page with its tables renewed. Raises `KeyError` for an unknown table."""
    return _TABLE.sub(lambda found: found[1] + _rows(*TABLES[found[2]]()) + found[3], page)


def _losses() -> Table:
    """Return the inputs of each loss beside `target_tokens`, and its groups of shared settings."""
    rows = []
    for loss in LOSSES.values():
        groups = [key for key, settings in SHARED.items() if set(settings) <= set(loss.settings)]
        optional = [each for each in loss.inputs if not each.required]
        rows.append(
            (
                f"`{loss.name}`",
                _names(loss.required),
                _names(each.name for each in optional),
                ", ".join(groups),
            )
        )
    return ("loss", "required inputs", "optional inputs", "shared settings"), rows


def _inputs() -> Table:
    """Return each input once, and again for losses that give it another meaning."""
    losses: dict[tuple[str, str], list[str]] = {}
    for loss in LOSSES.values():
        for each in loss.inputs:
            default = f". Without it, {each.default:g}" if isinstance(each.default, float) else ""
            row = (each.name, each.meaning + default + SHAPES[each.shape])
            losses.setdefault(row, []).append(loss.name)
    rows: list[tuple[str, ...]] = []
    seen: set[str] = set()
    for (name, meaning), owners in losses.items():
        others = f" in {_names(owners)}" if name in seen else ""
        label = f"`{name}`{others}"
        if rows and rows[-1][1] == meaning:
            label = f"{rows.pop()[0]}, {label}"
        rows.append((label, meaning))
        seen.add(name)
    return ("input", "meaning"), rows


def _own_settings() -> Table:
    """Return the settings that only some losses have."""
    shared = {each for settings in SHARED.values() for each in settings}
    owners: dict[Setting, list[str]] = {}
    for loss in LOSSES.values():
        for each in loss.settings:
            if each not in shared:
                owners.setdefault(each, []).append(loss.name)
    rows = [(_names(losses), *_setting(each)) for each, losses in owners.items()]
    return ("loss", *SETTING_HEAD), sorted(rows, key=lambda row: row[0])


def _settings(settings: Iterable[Setting]) -> Table:
    return SETTING_HEAD, [_setting(each) for each in settings]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _setting(each: Setting) -> tuple[str, ...]:
    """Return the cells of a setting. The page says that numbers are at least 0."""
    others = "".join(f", {choice}" for choice in each.choices if choice != each.default)
    assert each.choices or each.low == 0
    bound = " (> 0)" if each.above else ""
    return f"`{each.name}`", f"{_value(each)}{others}{bound}", each.meaning


def _value(setting: Setting) -> str:
    return setting.default if isinstance(setting.default, str) else f"{setting.default:.10g}"


def _corrections() -> Table:
    found = []
    for correction in CORRECTIONS.values():
        first = (correction.weight.__doc__ or "").split("\n\n")[0]
        settings = ", ".join(f"`{each.name}` {_value(each)}" for each in correction.settings)
        found.append((f"`{correction.name}`", " ".join(first.split()), settings))
    return ("correction", "weight w of a token", "settings with defaults"), found


TABLES = {
    "losses": _losses,
    "inputs": _inputs,
    "settings": _own_settings,
    "aggregation": partial(_settings, AGGREGATION_SETTINGS),
    "KL": partial(_settings, KL_SETTINGS),
    "corrections": _corrections,
}


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
