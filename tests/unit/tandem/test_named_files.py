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
PRODUCT = ("gateway", "protos", "sampler_service", "tandem", "trainer_service")
DESIGN = [*(ROOT / "docs" / "design").glob("*.md")]
FOLDERS_OF_PARTS = re.compile(r"^## Folders\n(.*?)^## ", re.DOTALL | re.MULTILINE)
IN_CODE = re.compile(r"`([^`\n]+)`")
SHORT_NAME = re.compile(r"[\w-]+(?:/[\w-]+)*\.(?:py|proto)")
CLASS = re.compile(r"[A-Z][a-z]+\w*[A-Z]\w*")


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


def test_every_module_that_a_design_page_names_without_its_folder_is_there():
    there = paths_of_code()
    named = {
        (page.name, name)
        for page in DESIGN
        for name in IN_CODE.findall(page.read_text())
        if SHORT_NAME.fullmatch(name)
    }
    assert len(named) >= 100
    assert [name for name in sorted(named) if not ends_one_of(there, name[1])] == []


def test_every_folder_of_the_architecture_is_there():
    found = FOLDERS_OF_PARTS.search((ROOT / "docs" / "design" / "architecture.md").read_text())
    assert found is not None
    listed = [line.partition(":")[0] for line in found[1].splitlines() if line.startswith("- `")]
    named = [name for part in listed for name in IN_CODE.findall(part)]
    assert len(named) >= 40
    there = paths_of_code()
    assert [name for name in named if not ends_one_of(there, name.rstrip("/"))] == []


def test_every_class_that_a_design_page_names_is_in_the_code():
    words: set[str] = set()
    for folder in PRODUCT:
        for suffix in ("*.py", "*.proto"):
            for file in (ROOT / folder).rglob(suffix):
                words.update(CLASS.findall(file.read_text()))
    named = {
        (page.name, name)
        for page in DESIGN
        for text in IN_CODE.findall(page.read_text())
        for name in CLASS.findall(text)
    }
    assert len(named) >= 10
    assert [name for name in sorted(named) if name[1] not in words] == []


def paths_of_code() -> set[str]:
    """Return each file and folder of the code, below the root."""
    return {
        str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*")
    }


def ends_one_of(paths: set[str], name: str) -> bool:
    return any(path == name or path.endswith(f"/{name}") for path in paths)
