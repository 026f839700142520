"""A run's name, tags and configuration, which a client gives in `user_metadata`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.errors import InvalidRequest

MAX_NAME, MAX_TAGS, MAX_CONFIG = 200, 50, 64 * 2**10
"""Characters of a name or a tag, the number of tags, and bytes of a configuration as JSON."""

MAX_METADATA = 2**14
"""Characters of the other keys as JSON."""
_IDENTITY = ("name", "tags", "config")
_MAX_DEPTH = 64
"""Levels of a configuration."""
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class RunIdentity:
    """The columns of `runs`. None: not given."""

    name: str | None = None
    tags: Sequence[str] | None = None
    config: Mapping[str, object] | None = None

    def check_limits(self) -> None:
        """Raises `InvalidRequest` beyond the limits."""
        if self.name is not None and len(self.name) > MAX_NAME:
            raise InvalidRequest(f"the run's name has {len(self.name)} characters, {MAX_NAME} fit")
        if self.tags is not None and len(self.tags) > MAX_TAGS:
            raise InvalidRequest(f"the run has {len(self.tags)} tags, {MAX_TAGS} at most")
        if long := [tag for tag in self.tags or () if len(tag) > MAX_NAME]:
            raise InvalidRequest(f"a tag has {len(long[0])} characters, {MAX_NAME} at most")
        _check_size(json.dumps(self.config, ensure_ascii=False))


def identity_of(
    user_metadata: Mapping[str, object] | None,
) -> tuple[RunIdentity, dict[str, object] | None]:
    """Return the identity in a run's `user_metadata`, and the other keys, None without any. A
    `config` that is no JSON object, or too deep, or with integers beyond 64 bits, stays with them.
    Raises `InvalidRequest` beyond the limits."""
    others = dict(user_metadata or {})
    name, tags = others.pop("name", None), others.pop("tags", None)
    _check_size(text := str(others.get("config", "")))
    config = _parsed(text)
    if isinstance(config, dict):
        del others["config"]
    identity = RunIdentity(
        name=_text(str(name)) if name is not None else None,
        tags=_tags(str(tags)) if tags is not None else None,
        config=config if isinstance(config, dict) else None,
    )
    identity.check_limits()
    return identity, others or None


def identity_changes(
    given: Mapping[str, Any], others: Mapping[str, str] | None
) -> dict[str, object]:
    """Return the columns of `runs` to change, from fields of `RunIdentity` and `user_metadata`.
    `others` are the run's other keys. Raises `InvalidRequest`."""
    fields = dict(given)
    metadata: Mapping[str, str | None] = fields.pop("user_metadata", None) or {}
    if isinstance(name := fields.get("name"), str):
        fields["name"] = _text(name)
    if isinstance(tags := fields.get("tags"), list):
        fields["tags"] = _distinct(tags)
    if "config" in fields:
        fields["config"] = _checked(fields["config"])
    replace(RunIdentity(), **fields).check_limits()
    if fixed := [k for k in metadata if k in _IDENTITY or k.startswith("tandem")]:
        raise InvalidRequest(
            f"user_metadata: {fixed[0][:100]!r} cannot be changed here; name, tags and config are "
            "fields of their own, and keys of tandem apply when a run is created"
        )
    if metadata:
        merged = {k: v for k, v in {**(others or {}), **metadata}.items() if v is not None}
        if len(json.dumps(merged)) > MAX_METADATA:
            raise InvalidRequest(f"the user_metadata has more than {MAX_METADATA} characters")
        fields["user_metadata"] = merged or None
    return fields


def metadata_of(
    identity: RunIdentity, others: Mapping[str, str] | None
) -> Mapping[str, str] | None:
    """Return the `user_metadata` of an identity and the other keys, as a client gave them."""
    given: dict[str, str] = {}
    if identity.name is not None:
        given["name"] = identity.name
    if (tags := identity.tags) is not None:
        plain = not any("," in tag for tag in tags)
        given["tags"] = ",".join(tags) if plain else json.dumps(tags, ensure_ascii=False)
    if identity.config is not None:
        given["config"] = json.dumps(identity.config, ensure_ascii=False)
    return {**given, **(others or {})} or None


def _check_size(config: str) -> None:
    if (size := len(config.encode(errors="replace"))) > MAX_CONFIG:
        raise InvalidRequest(f"the run's config has {size} bytes as JSON, {MAX_CONFIG} at most")


def _parsed(text: str) -> object:
    """Return parsed JSON as `_checked` does, None for other text."""
    try:
        return _checked(json.loads(text, parse_float=_finite))
    except (ValueError, RecursionError):
        return None


def _checked(value: object, depth: int = 0) -> object:
    """Return a value of JSON. NaN and infinities become text, since PostgreSQL refuses them, and
    U+FFFD replaces half a surrogate pair. Raises `InvalidRequest`."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise InvalidRequest("the run's config has an integer beyond 64 bits; give it as text")
    if isinstance(value, dict | list) and depth == _MAX_DEPTH:
        raise InvalidRequest(f"the run's config has more than {_MAX_DEPTH} levels; flatten it")
    if isinstance(value, dict):
        return {_text(key): _checked(one, depth + 1) for key, one in value.items()}
    if isinstance(value, list):
        return [_checked(one, depth + 1) for one in value]
    return value


def _finite(text: str) -> float | str:
    return value if math.isfinite(value := float(text)) else text


def _text(text: str) -> str:
    return _SURROGATE.sub("\ufffd", text)


def _tags(text: str) -> list[str]:
    listed = _parsed(text)
    return _distinct(listed if isinstance(listed, list) else text.split(","))


def _distinct(tags: Iterable[object]) -> list[str]:
    stripped = (_text(str(tag)).strip() for tag in tags)
    return list(dict.fromkeys(tag for tag in stripped if tag))
