from __future__ import annotations

from scripts.settings_table import SHARING_PAGE, with_sharing
from tandem.settings.sharing import Sharing


def test_the_page_has_each_way_to_share_devices_as_the_code_has_it():
    page = SHARING_PAGE.read_text()
    assert with_sharing(page) == page, "run `python -m scripts.settings_table`"
    for each in Sharing:
        strategy = each.strategy(memory_bytes=1)
        shown = f"`{strategy['strategy']}`" if strategy is not None else ""
        assert f"| `{each}` | {each.meaning} | {shown} |" in page
    assert page.count("<!-- sharing -->") == 1


def test_each_way_has_one_sentence():
    for each in Sharing:
        assert each.meaning.endswith(".") and ". " not in each.meaning
