"""The models directory: base models from `tandem models add`, for all gateways that see it.

The model `ORG/NAME` is in the folder `ORG/NAME`, in the Hugging Face layout, with a record that is
written last. A folder without a record is an unfinished download or a removed model. Files of a
model with a record never change, because runs depend on them."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from tandem.settings.chosen_names import is_model_name

RECORD_NAME = ".tandem-model.json"
"""Hidden, so that it does not count as a file of the model."""


class ModelRecord(BaseModel):
    """The origin of a model.

    `revision` is the requested branch, tag or commit. `bytes` counts all files. `added_at` is in
    seconds since 1970."""

    repository: str
    revision: str
    commit: str
    bytes: int
    added_at: float


def read_record(folder: Path) -> ModelRecord | None:
    """Raises `OSError` and `ValueError`."""
    try:
        return ModelRecord.model_validate_json((folder / RECORD_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None


def models_in(directory: Path) -> dict[str, Path]:
    found = (
        record.parent
        for depth in ("*", "*/*", "*/*/*")
        for record in directory.glob(f"{depth}/{RECORD_NAME}")
    )
    named = {str(folder.relative_to(directory)): folder for folder in found}
    return {name: named[name] for name in sorted(named) if is_model_name(name)}
