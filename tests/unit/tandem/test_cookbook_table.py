from __future__ import annotations

from scripts.cookbook_table import PAGE, with_table


def test_the_table_of_recipes_is_that_of_the_nightly_results():
    page = PAGE.read_text()
    assert with_table(page) == page, "run `python -m scripts.cookbook_table`"
