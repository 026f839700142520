from __future__ import annotations

import pytest

from scripts import settings_table
from scripts.settings_table import PAGE, with_settings
from tandem.settings.variables import settings_by_name

MOST_SETTINGS = 95


def test_the_page_has_each_setting_as_the_code_has_it():
    page = PAGE.read_text()
    assert with_settings(page) == page, "run `python -m scripts.settings_table`"
    for name, field in settings_by_name():
        assert f"| `{name}` |" in page
        assert field.description and field.description in page


def test_each_setting_has_one_sentence():
    for name, field in settings_by_name():
        assert field.description, name
        assert field.description.endswith("."), name
        assert ". " not in field.description, name


def test_there_are_few_settings():
    assert len(list(settings_by_name())) <= MOST_SETTINGS


def test_a_setting_without_a_subject_is_refused(monkeypatch):
    subjects = {key: names for key, names in settings_table._SUBJECTS.items() if key != "Limits"}
    monkeypatch.setattr(settings_table, "_SUBJECTS", subjects)
    with pytest.raises(ValueError, match=r"have no subject: .*TANDEM_LIMIT_RUNS"):
        with_settings(PAGE.read_text())
