"""The metadata that clients attach to sessions, runs and checkpoints.

Its size is bounded, because lists show it, hundreds of rows at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import AfterValidator

_MAX_CHARACTERS = 2**14

_Content = TypeVar("_Content", bound=Mapping[str, object])


def _bounded(metadata: _Content) -> _Content:
    size = len(json.dumps(metadata, ensure_ascii=False))
    if size > _MAX_CHARACTERS:
        raise ValueError(f"it has {size} characters as JSON, {_MAX_CHARACTERS} at most")
    return metadata


Metadata = Annotated[dict[str, object], AfterValidator(_bounded)]
TextMetadata = Annotated[dict[str, str], AfterValidator(_bounded)]


def text_metadata(metadata: Mapping[str, object] | None) -> dict[str, str] | None:
    """Return metadata in the SDK's type, which has only text values. An old client sends other
    values too; they become their JSON."""
    if not metadata:
        return None
    return {
        key: value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        for key, value in metadata.items()
    }
