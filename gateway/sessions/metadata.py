"""What clients note on sessions, runs and checkpoints. Lists show it, hundreds of rows at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import AfterValidator

_MOST_CHARACTERS = 2**14

Noted = TypeVar("Noted", bound=Mapping[str, object])


def _bounded(noted: Noted) -> Noted:
    size = len(json.dumps(noted, ensure_ascii=False))
    if size > _MOST_CHARACTERS:
        raise ValueError(f"it has {size} characters as JSON, {_MOST_CHARACTERS} at most")
    return noted


Metadata = Annotated[dict[str, object], AfterValidator(_bounded)]
TextMetadata = Annotated[dict[str, str], AfterValidator(_bounded)]
