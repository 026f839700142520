"""Write the table of docs/cookbook.md: tinker-cookbook's entry points, and which run.

The results come from the nightly tests: tests/golden/cookbook.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.cookbook_entries import BLOCKED, BY_HAND, ENTRIES, IN_OTHER_TESTS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cookbook.md"
RESULTS = ROOT / "tests" / "golden" / "cookbook.json"
SAYS = {"runs": "yes", "fails": "**no**", "": "not yet run"}
_TABLE = re.compile(r"(<!-- table: entries -->\n).*?(<!-- end -->)", re.DOTALL)


def with_table(page: str) -> str:
    """Return the page with its table renewed."""
    found = json.loads(RESULTS.read_text())
    rows = [("recipe", "runs", "needs, or why it does not run"), ("---", "---", "---")]
    rows += [(f"`{each.name}`", SAYS[found.get(each.name, "")], each.needs) for each in ENTRIES]
    rows += [(f"`{name}`", "yes", needs) for name, needs in IN_OTHER_TESTS.items()]
    rows += [(f"`{name}`", "once, by hand", needs) for name, needs in BY_HAND.items()]
    rows += [(f"`{name}`", "no", why) for name, why in BLOCKED.items()]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return _TABLE.sub(lambda match: match[1] + table + match[2], page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
