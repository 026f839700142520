"""Every relative link of README.md, its neighbours and docs/ leads to a file and to its heading.

So does every heading of a page that code, manifests or messages name with its anchor."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)")
NAMED_PAGE = re.compile(r"(docs/[\w/-]+\.md)#([\w-]+)")
FOLDERS = ("deploy", "gateway", "k8s", "sampler_service", "scripts", "tandem", "trainer_service")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
OWN_ANCHOR = re.compile(r'<a (?:id|name)="([^"]+)"')


def test_every_link_leads_to_a_file():
    missing = [f"{page}: {path}" for page, path, _ in links() if not (page.parent / path).exists()]
    assert not missing, "\n".join(missing)


def test_every_anchor_is_a_heading():
    missing = [
        f"{page}: {path}#{anchor}"
        for page, path, anchor in links()
        if (target := page.parent / path if path else page).is_file()
        and anchor
        and anchor not in anchors(target.read_text())
    ]
    assert not missing, "\n".join(missing)


def test_every_heading_named_in_code_exists():
    missing = [
        f"{file}: {page}#{anchor}"
        for file in named_from()
        for page, anchor in NAMED_PAGE.findall(file.read_text(errors="ignore"))
        if not (ROOT / page).is_file() or anchor not in anchors((ROOT / page).read_text())
    ]
    assert not missing, "\n".join(missing)


def test_links_and_named_headings_are_found():
    named = [
        each for file in named_from() for each in NAMED_PAGE.findall(file.read_text("latin-1"))
    ]
    assert len([*links()]) >= 50 and any(anchor for _, _, anchor in links()) and named


def test_anchors_are_made_as_github_makes_them():
    text = "# A *run's* `name`, or: none\n## Twice\n```\n# no heading\n```\n## Twice\n"
    assert anchors(text) == {"a-runs-name-or-none", "twice", "twice-1"}
    assert anchors("## [stable_reinforce](a.md)\n") == {"stable_reinforce"}


def links() -> Iterator[tuple[Path, str, str]]:
    """Yield each page with the path ("" for the page itself) and the anchor of each link."""
    for page in PAGES:
        for path, anchor in LINK.findall(CODE.sub("", page.read_text())):
            yield page, path, anchor


def named_from() -> Iterator[Path]:
    """Yield the files that may name a heading: those of the product and its deployments."""
    yield from (ROOT / name for name in ("Makefile", "docker-compose.yaml", "pyproject.toml"))
    for folder in FOLDERS:
        for place, _, names in os.walk(ROOT / folder):
            yield from (Path(place, name) for name in names if not name.endswith(".pyc"))


@cache
def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, and those that it names itself."""
    found = set(OWN_ANCHOR.findall(text))
    seen: dict[str, int] = {}
    for heading in HEADING.findall(CODE.sub("", text)):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.strip())
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found
