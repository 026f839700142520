from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from trainer_service.losses import CORRECTIONS, LOSSES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "training.md").read_text()
TABLES = runpy.run_path(str(ROOT / "scripts" / "loss_tables.py"))


def test_the_tables_are_those_of_the_registry():
    assert TABLES["with_tables"](PAGE) == PAGE, "run `python scripts/loss_tables.py`"


def test_every_table_is_on_the_page():
    assert set(re.findall(r"<!-- table: (\S+) -->", PAGE)) == set(TABLES["TABLES"])


def test_a_changed_default_would_be_noticed():
    assert "| `clip_high_threshold` | 1.2 |" in PAGE
    changed = PAGE.replace("| `clip_high_threshold` | 1.2 |", "| `clip_high_threshold` | 1.3 |")
    assert TABLES["with_tables"](changed) == PAGE


@pytest.mark.parametrize("name", [*LOSSES, *CORRECTIONS])
def test_formula_and_source_stand_in_the_docstring(name):
    function = LOSSES[name].compute if name in LOSSES else CORRECTIONS[name].weight
    text = function.__doc__ or ""
    named = ("arXiv", "yingru.notion.site", "verl", "Tinker", "-Σ w·p")
    assert any(source in text for source in named)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_a_formula(name):
    assert f"\n| `{name}` | " in PAGE[: PAGE.index("\n### Inputs\n")]
