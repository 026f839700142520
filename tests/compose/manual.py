"""Runs the commands of docs/deploy-compose.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.compose.engine import ROOT, has_plugin, output

PAGE = ROOT / "docs/deploy-compose.md"
_BLOCK = re.compile(r"^```\n(.*?)^```$", re.M | re.S)
_WITHOUT_PLUGIN = """\
docker() {
  if [ "$1" = compose ]; then shift; command docker-compose "$@"; else command docker "$@"; fi
}
"""


def blocks(heading: str) -> list[str]:
    """Return the command blocks below a heading of the page.

    >>> len(blocks("Backup"))
    2"""
    _, _, after = PAGE.read_text().partition(f"\n## {heading}\n")
    return _BLOCK.findall(after.partition("\n## ")[0])


def carry_out(block: str, folder: Path) -> None:
    """Run a block in a folder, in a terminal of its own, until a command fails."""
    preamble = "" if has_plugin() else _WITHOUT_PLUGIN
    command = shlex.join(("bash", "-ceu", f"set -o pipefail\n{preamble}{block}"))
    output("script", "--quiet", "--return", "--command", command, "/dev/null", folder=folder)
