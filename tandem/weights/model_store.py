"""The models directory: base models that `tandem models add` downloaded, for every gateway that
sees the directory.

The model `ORG/NAME` is the folder `ORG/NAME` of it, in the Hugging Face layout, with a record that
is written last. A folder without one is none of a gateway's models: its download has not ended, or
the model was removed. The files of a model with a record never change, for runs depend on them.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from tandem.settings.chosen_names import is_model_name

RECORD_NAME = ".tandem-model.json"
"""Hidden, so that nothing takes it for a file of the model."""


class ModelRecord(BaseModel):
    """Where a model comes from: `revision` as it was asked for, a branch, a tag or a commit;
    `bytes` of all its files; `added_at` in seconds since 1970."""

    repository: str
    revision: str
    commit: str
    bytes: int
    added_at: float


def read_record(folder: Path) -> ModelRecord | None:
    """Return a model's record, None where there is none. Raises `OSError`, `ValueError`."""
    try:
        return ModelRecord.model_validate_json((folder / RECORD_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None


def models_in(directory: Path) -> dict[str, Path]:
    """Return the folders of the models that a models directory has, by their names."""
    found = (
        record.parent
        for depth in ("*", "*/*", "*/*/*")
        for record in directory.glob(f"{depth}/{RECORD_NAME}")
    )
    named = {str(folder.relative_to(directory)): folder for folder in found}
    return {name: named[name] for name in sorted(named) if is_model_name(name)}
