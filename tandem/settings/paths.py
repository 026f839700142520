"""The type of optional paths in settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

OptionalPath = Annotated[Path | None, BeforeValidator(lambda given: given or None)]
"""An optional file or folder. An empty variable means none."""
