"""The settings file of `tandem up --config`: TOML with the names of the settings.

`port = 8000` is TANDEM_PORT. `trainer_ranks = 2`, or `ranks = 2` in the table `[trainer]`, is
TANDEM_TRAINER_RANKS. A setting of the environment wins over the file."""

from __future__ import annotations

import json
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from tandem.errors import InvalidRequest, UnknownSetting
from tandem.settings.variables import settings_by_name

_HEADER = re.compile(r"\s*\[+\s*([^\[\]]+?)\s*\]+\s*(#.*)?")
_KEY = re.compile(r"\s*([\w.\"'-]+?(?:\s*\.\s*[\w\"'-]+)*)\s*=")


@dataclass(frozen=True)
class FileSetting:
    """The text of a setting, as its variable would have it, and its line in the file."""

    text: str
    line: int


def apply_config_file(path: Path, environment: MutableMapping[str, str]) -> dict[str, FileSetting]:
    """Put the settings of a file into the environment, and return those that it did not have.

    Raises `InvalidRequest` for an unreadable file, and `UnknownSetting`."""
    found = read_config_file(path)
    new = {name: each for name, each in found.items() if name not in environment}
    environment.update({name: each.text for name, each in new.items()})
    return new


def read_config_file(path: Path) -> dict[str, FileSetting]:
    """Return the settings of a file by variable. Raises as `apply_config_file`."""
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not text in UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(f"{path} is not TOML: {error}") from error
    known = {name for name, _ in settings_by_name()}
    found: dict[str, FileSetting] = {}
    for keys, value in _values(content, (), known):
        name, line = _variable(keys), _line_of(text, keys)
        if name not in known:
            raise UnknownSetting(f"{path}, line {line}: {_question(keys, known)}")
        if name in found:
            raise InvalidRequest(
                f"{path} has {name} twice, in the lines {found[name].line} and {line}"
            )
        found[name] = FileSetting(value if isinstance(value, str) else _json(value), line)
    return found


def why_exposed(path: Path) -> str:
    """Return a sentence if others may read the secrets of a file, or "". Raises as
    `read_config_file`."""
    found = read_config_file(path)
    secrets = sorted(name for name, field in settings_by_name() if not field.repr and name in found)
    if not secrets or not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return ""
    return (
        f"{path} holds {' and '.join(secrets)}, and other users of this machine may read it: "
        f"chmod 600 {path}"
    )


def _values(
    table: Mapping[str, object], outer: tuple[str, ...], known: set[str]
) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the settings of a table with their keys. A setting's own value may be a table."""
    for key, value in table.items():
        keys = (*outer, key)
        if isinstance(value, dict) and _variable(keys) not in known:
            yield from _values(value, keys, known)
        else:
            yield keys, value


def _variable(keys: tuple[str, ...]) -> str:
    name = "_".join(keys).replace("-", "_").upper()
    return name if name.startswith("TANDEM_") else f"TANDEM_{name}"


def _question(keys: tuple[str, ...], known: set[str]) -> str:
    names = {name.removeprefix("TANDEM_").lower() for name in known}
    name = _variable(keys).removeprefix("TANDEM_").lower()
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else "docs/operations.md#settings has the names"
    return f"{'.'.join(keys)} is unknown; {hint}"


def _json(value: object) -> str:
    try:
        return json.dumps(value)
    except TypeError as error:  # a date
        raise InvalidRequest(f"no setting is of the type {type(value).__name__}") from error


def _line_of(text: str, keys: tuple[str, ...]) -> int:
    """Return the line that sets a key: the last one whose keys begin the key's."""
    table: tuple[str, ...] = ()
    found = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.fullmatch(line):
            table = here = _parts(header[1])
        elif key := _KEY.match(line):
            here = (*table, *_parts(key[1]))
        else:
            continue
        if here == keys:
            return number
        if keys[: len(here)] == here:
            found = number
    return found


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
