"""Write the table of docs/sharing.md from the ways to share devices: `python -m
scripts.sharing_table`.

The lines between `<!-- sharing -->` and `<!-- end -->` are replaced."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tandem.settings.sharing import Sharing

PAGE = Path(__file__).parents[1] / "docs" / "sharing.md"
_BLOCK = re.compile(r"(<!-- sharing -->\n).*?(<!-- end -->)", re.DOTALL)


def with_sharing(page: str) -> str:
    return _BLOCK.sub(lambda found: found[1] + "\n".join(_lines()) + "\n" + found[2], page)


def _lines() -> Iterator[str]:
    yield "| value | meaning | strategy of the claim |"
    yield "|---|---|---|"
    for each in Sharing:
        strategy = each.strategy(memory_bytes=1)
        shown = f"`{strategy['strategy']}`" if strategy is not None else ""
        yield f"| `{each}` | {each.meaning} | {shown} |"


if __name__ == "__main__":
    PAGE.write_text(with_sharing(PAGE.read_text()))
