"""Writes the tables of docs/losses.md from the registry of losses. `loss_tables.py`.

What stands between `<!-- table: NAME -->` and `<!-- end -->` is replaced; everything else of
the page is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from trainer_service.losses import CORRECTIONS, LOSSES, Input, Setting
from trainer_service.losses.base import AGGREGATION_SETTINGS
from trainer_service.losses.policy import CORRECTION_SETTINGS, KL_SETTINGS

PAGE = Path(__file__).parents[1] / "docs" / "losses.md"
SHARED: dict[str, tuple[Setting, ...]] = {
    "aggregation": AGGREGATION_SETTINGS,
    "KL": KL_SETTINGS,
    "corrections": CORRECTION_SETTINGS,
}
SHAPES = {"entry": "as targets", "datum": "[1]", "either": "as targets or [1]", "free": "any"}
_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """The page with every table as the registry has it. `KeyError` for an unknown name."""
    return _TABLE.sub(lambda found: found[1] + _table(found[2]) + found[3], page)


def tables_of(page: str) -> set[str]:
    """The names of all tables of a page."""
    return {found[2] for found in _TABLE.finditer(page)}


def _table(name: str) -> str:
    if name in SHARED:
        return _settings(SHARED[name])
    if name == "names-of-corrections":
        return _rows(("name", "what it is"), _corrections())
    loss = LOSSES[name]
    shared = {each for settings in SHARED.values() for each in settings}
    own = [each for each in loss.settings if each not in shared]
    groups = [key for key, settings in SHARED.items() if set(settings) <= set(loss.settings)]
    text = _inputs(loss.inputs)
    if own:
        text += "\n" + _settings(own)
    if groups:
        text += f"\nAlso the settings of: {', '.join(groups)}.\n"
    return text


def _inputs(inputs: Iterable[Input]) -> str:
    rows = [("`target_tokens`", "int64", "yes", "the tokens whose log probability p is taken")]
    rows += [(f"`{each.name}`", SHAPES[each.shape], _needed(each), each.meaning) for each in inputs]
    return _rows(("input", "shape", "needed", "meaning"), rows)


def _needed(given: Input) -> str:
    if given.required:
        return "yes"
    if given.needed_with:
        return f"with `{given.needed_with}`"
    if isinstance(given.default, float):
        return f"no: {given.default:g}"
    return "no: the setting" if given.default == given.name else "no"


def _settings(settings: Iterable[Setting]) -> str:
    rows = [(f"`{each.name}`", _value(each), _range(each), each.meaning) for each in settings]
    return _rows(("setting", "default", "range", "meaning"), rows)


def _value(setting: Setting) -> str:
    return setting.default if isinstance(setting.default, str) else f"{setting.default:.10g}"


def _range(setting: Setting) -> str:
    if isinstance(setting.default, str):
        return ", ".join(setting.choices) or "text"
    if setting.low is None:
        return "any number"
    return f"{'>' if setting.above else '≥'} {setting.low:g}"


def _corrections() -> list[tuple[str, str]]:
    found = []
    for correction in CORRECTIONS.values():
        first = (correction.weight.__doc__ or "").split("\n\n")[0]
        found.append((f"`{correction.name}`", " ".join(first.split())))
    return found


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
