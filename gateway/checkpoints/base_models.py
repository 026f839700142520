"""The base models that clients may use, by name."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import delete, insert, select

from gateway.identifiers import check_model_name
from gateway.storage.data_directory import relative_path
from gateway.storage.database import Database, from_row
from gateway.storage.tables import models
from tandem.errors import InvalidRequest, UnknownModel
from tandem.protocol.sample_limits import SampleLimits
from tandem.telemetry import get_log
from tandem.weights.model_config import model_length, text_config
from tandem.weights.model_files import check_weights
from tandem.weights.model_store import RECORD_NAME, models_in

_MAX_LENGTH = 2**31 - 1
"""Tokens. Larger numbers in configs mean "no limit"."""


@dataclass(frozen=True)
class BaseModelEntry:
    """`path` is a folder in the Hugging Face layout, empty if hidden. `max_length` is in tokens,
    None if unknown. `added_at` is in seconds since 1970."""

    name: str
    path: str
    max_length: int | None
    added_at: float = 0.0

    @property
    def note(self) -> str:
        """Explain why `SamplingClient.get_tokenizer` cannot use this name, or return "".

        The SDK cuts ORGANISATION/MODEL/VARIANT to two parts (`_load_tokenizer_from_model_info`), so
        a path of two parts needs a slash at its end."""
        if self.name.count("/") == 2:
            place = repr(self.name.rpartition("/")[0])
        elif self.name.startswith("meta-llama/Llama-3"):
            place = "another repository"
        elif self.name.startswith(("TML/", "thinkingmachines/")):
            place = "a package of Thinking Machines"
        else:
            return ""
        path = f": {self.path.rstrip('/')}/" if self.path else ""
        return (
            f"SamplingClient.get_tokenizer looks for the tokenizer of {self.name!r} in {place}; "
            f"give the model another name, or name it by its path when sampling{path}"
        )


class BaseModels:
    """The known base models. A registered model has a row. A model in the models directory has a
    record file (`tandem/weights/model_store.py`)."""

    def __init__(self, *, database: Database, data_dir: Path, models_dir: Path) -> None:
        self._database = database
        self._data_dir = data_dir
        self._models_dir = models_dir
        self._entries: dict[str, BaseModelEntry] = {}
        self._unfit: dict[str, str] = {}
        self._longest: dict[str, int] = {}
        self._vocabularies: dict[BaseModelEntry, int] = {}

    async def read_models(self) -> None:
        for row in await self._database.read(select(models).order_by(models.c.name)):
            path = str(self._data_dir / row["path"])
            self._entries[row["name"]] = from_row(BaseModelEntry, row, path=path)
        await self.discover_models()

    async def discover_models(self) -> None:
        """Add new models of the models directory. A missing folder removes none, as a shared
        filesystem may be away."""
        for name, folder in (await asyncio.to_thread(models_in, self._models_dir)).items():
            if name in self._entries:
                continue
            try:
                await self._take(name, folder)
            except InvalidRequest as error:
                if self._unfit.get(name) != error.message:
                    get_log().warning("model_unfit", model=name, reason=error.message)
                self._unfit[name] = error.message
            else:
                get_log().info("model_found", model=name, path=str(folder))

    def all(self) -> list[BaseModelEntry]:
        return list(self._entries.values())

    def get(self, name: str) -> BaseModelEntry:
        """Return a model by name or by registered path, from which a client can load the tokenizer.
        The path may end with a slash (see `note`) and may have lost its first slash in a URL.
        Raises `UnknownModel`."""
        entry = self._entries.get(name)
        if entry is None:
            path = Path("/", name)
            entry = next((e for e in self._entries.values() if Path(e.path) == path), None)
        if entry is None:
            known = ", ".join(sorted(self._entries)) or "none yet; add one with `tandem models add`"
            raise UnknownModel(f"unknown model {name!r}; known: {known}")
        return entry

    def note_longest(self, name: str, length: int) -> None:
        """Note the longest sequence, in tokens, that an engine reported for the model."""
        self._longest[name] = length

    def context_length(self, entry: BaseModelEntry) -> int | None:
        """Return the longest known sequence: the smaller of the model's limit and the last engine's
        KV cache."""
        known = (entry.max_length, self._longest.get(entry.name))
        return min((length for length in known if length), default=None)

    async def limits(self, entry: BaseModelEntry) -> SampleLimits:
        vocabulary = self._vocabularies.get(entry)
        if vocabulary is None:
            vocabulary = await asyncio.to_thread(_read_vocabulary, Path(entry.path))
            if vocabulary is not None:
                self._vocabularies[entry] = vocabulary
        return SampleLimits(
            vocabulary=vocabulary,
            max_length=self.context_length(entry),
            model_length=entry.max_length,
        )

    async def add(self, *, name: str, path: str) -> BaseModelEntry:
        """Register a model, or give a name another path. Raises `InvalidRequest`."""
        check_model_name(name)
        folder, forget = Path(path), delete(models).where(models.c.name == name)
        if self._is_recorded(name, folder):
            entry = await self._take(name, folder)
            await self._database.write(forget)
            return entry
        entry = await self._entry(name, folder)
        row = {**vars(entry), "path": relative_path(folder, self._data_dir)}
        await self._database.write_together(forget, insert(models).values(row))
        self._entries[name] = entry
        return entry

    async def remove(self, name: str) -> None:
        """Remove a model and its record file. Other files stay, and runs go on. Raises
        `UnknownModel`, or `InvalidRequest` if the record cannot be removed."""
        entry = self.get(name)
        if self._is_recorded(entry.name, folder := Path(entry.path)):
            try:
                await asyncio.to_thread((folder / RECORD_NAME).unlink, missing_ok=True)
            except OSError as error:
                raise InvalidRequest(
                    f"{folder / RECORD_NAME} cannot be removed: {error.strerror}"
                ) from error
        del self._entries[entry.name]
        await self._database.write(delete(models).where(models.c.name == entry.name))

    def _is_recorded(self, name: str, folder: Path) -> bool:
        return folder == self._models_dir / name and (folder / RECORD_NAME).exists()

    async def _take(self, name: str, folder: Path) -> BaseModelEntry:
        self._entries[name] = entry = await self._entry(name, folder)
        return entry

    async def _entry(self, name: str, folder: Path) -> BaseModelEntry:
        max_length = await asyncio.to_thread(_check_model, folder)
        return BaseModelEntry(
            name=name, path=str(folder), max_length=max_length, added_at=time.time()
        )


def _check_model(path: Path) -> int | None:
    """Return the context length in the config. Raise `InvalidRequest` for a folder without a whole
    model."""
    if not path.is_absolute():
        raise InvalidRequest(f"the path of a model must be absolute, not {str(path)!r}")
    config = path / "config.json"
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidRequest(
            f"{path} is not a model in the Hugging Face layout: it has no config.json"
        ) from error
    except OSError as error:
        raise InvalidRequest(f"{config} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidRequest(f"{config} is not JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("architectures"), list):
        raise InvalidRequest(f"{config} names no architecture")
    try:
        check_weights(path)
    except InvalidRequest as error:
        raise InvalidRequest(f"the model {path} is not whole: {error.message}") from error
    length = model_length(path)
    return length if length is not None and length <= _MAX_LENGTH else None


def _read_vocabulary(path: Path) -> int | None:
    try:
        size = text_config(path).get("vocab_size")
    except (OSError, ValueError):
        return None
    return size if isinstance(size, int) else None
