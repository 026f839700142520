from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = (
    "benchmarks",
    "constraints",
    "docs",
    "gateway",
    "protos",
    "sampler_service",
    "scripts",
    "tandem",
    "tests",
    "trainer_service",
)
NAMED = re.compile(
    rf"(?<![\w/])(?:{'|'.join(FOLDERS)})/[\w./-]*\w\.(?:py|sh|proto|toml|md|json|txt)\b"
)


def texts() -> list[Path]:
    files = [file for file in ROOT.glob("*") if file.suffix in (".md", ".toml")]
    files.append(ROOT / "Makefile")
    for folder in FOLDERS:
        for suffix in ("*.py", "*.md"):
            files += (ROOT / folder).rglob(suffix)
    return [file for file in files if file != Path(__file__) and "_pb2" not in file.name]


def test_every_file_that_is_named_is_there():
    named = [(file, name) for file in texts() for name in NAMED.findall(file.read_text())]
    assert len(named) >= 200
    missing = {
        f"{file.relative_to(ROOT)}: {name}" for file, name in named if not (ROOT / name).exists()
    }
    assert not missing, "\n".join(sorted(missing))
