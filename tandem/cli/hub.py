"""Downloads a base model from a Hugging Face hub into the models directory.

`huggingface_hub` transfers the files. It uses the token of HF_TOKEN, resumes broken transfers, and
keeps complete files. This module chooses top-level files of the model, the tokenizer and
safetensors, no pickles and no code. Before the large files, it checks that they are a model and fit
on the disk. Afterwards it compares checksums, and then writes the record by which gateways find the
model."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tandem.cli.tables import byte_size
from tandem.errors import InvalidRequest, ServerError, StorageFull, UserError, describe
from tandem.settings.chosen_names import model_name_fault
from tandem.weights.model_config import INDEX_NAME
from tandem.weights.model_files import PICKLES, SINGLE_NAME, check_weights
from tandem.weights.model_store import RECORD_NAME, ModelRecord, read_record
from tandem.weights.store import fsync_path

Say = Callable[[str], None]
Show = Callable[[int, int], None]
"""Called about once a second with the present bytes and the total."""

_TEXTS = (".json", ".txt", ".jinja", ".model")
_PAPERS = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_PARTS = Path(".cache", "huggingface", "download")
_AGAIN = "what is complete is kept; run the command again to go on"


@dataclass(frozen=True)
class Wanted:
    """A model to download.

    `revision` is a branch, tag or commit of the `repository` at the `hub`. `name` is the clients'
    name for it. `spare` bytes must stay free on the disk."""

    hub: str
    repository: str
    revision: str
    name: str
    directory: Path
    spare: int = 0

    @property
    def folder(self) -> Path:
        return self.directory / self.name


@dataclass(frozen=True)
class Added:
    """`downloaded` is in bytes, 0 if all was present. `notes` list limitations."""

    folder: Path
    record: ModelRecord
    downloaded: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Listing:
    """The files of a commit with their sizes."""

    commit: str
    sizes: dict[str, int]

    def total(self, names: list[str]) -> int:
        return sum(self.sizes[name] for name in names)


def add_model(wanted: Wanted, *, say: Say, show: Show) -> Added:
    """Download a model unless it is present, and write its record.

    Raises `UserError` for a missing or invalid model, `ServerError` for a fault that may pass, and
    `OSError`."""
    if why := model_name_fault(wanted.name):
        raise UserError(why)
    _choose_cache(wanted.directory)
    with _locked(wanted):
        if (record := read_record(wanted.folder)) is not None:
            if record.repository == wanted.repository and wanted.revision in (
                record.revision,
                record.commit,
            ):
                return Added(wanted.folder, record, downloaded=0)
            raise UserError(
                f"{wanted.name} is {record.repository} at {record.revision} ({record.commit[:12]}) "
                "already, which runs may use; give the other one a name of its own with --name"
            )
        _check_folder(wanted.folder)
        with _as_sentences(wanted):
            return _download(wanted, say=say, show=show)


def _download(wanted: Wanted, *, say: Say, show: Show) -> Added:
    listing = _list_files(wanted)
    texts = [name for name in listing.sizes if _is_text(name)]
    if "config.json" not in texts:
        raise UserError(
            f"{wanted.repository} is no model in the Hugging Face layout: no config.json"
        )
    _remove_rests(wanted.folder)
    downloaded = _fetch(wanted, listing, texts, show=lambda *_: None)
    notes = _check_texts(wanted, texts)
    files = [*texts, *_choose_weights(wanted, listing)]
    total = listing.total(files)
    say(
        f"{wanted.repository} at {wanted.revision} is {listing.commit[:12]}: {byte_size(total)} in "
        f"{len(files)} files"
    )
    missing = total - _bytes_there(wanted.folder, files)
    free = shutil.disk_usage(wanted.folder).free
    if missing + wanted.spare > free:
        raise StorageFull(
            f"{wanted.repository} needs {byte_size(missing)} more, with {byte_size(wanted.spare)} "
            f"to spare, and {wanted.directory} has {byte_size(free)} free; free some space, or "
            "choose another --dir"
        )
    downloaded += _fetch(wanted, listing, files, show=show)
    say("Comparing the files with the hub's checksums")
    _verify(wanted, listing, files)
    try:
        check_weights(wanted.folder)
    except InvalidRequest as error:
        raise UserError(f"{wanted.repository} is not whole at the hub: {error.message}") from error
    for path in wanted.folder.iterdir():
        if path.is_file() and path.name not in files:  # left by another revision's download
            path.unlink()
    record = ModelRecord(
        repository=wanted.repository,
        revision=wanted.revision,
        commit=listing.commit,
        bytes=total,
        added_at=time.time(),
    )
    _write_record(wanted.folder, record, files)
    return Added(wanted.folder, record, downloaded=downloaded, notes=notes)


def _list_files(wanted: Wanted) -> _Listing:
    from huggingface_hub import HfApi

    info = HfApi(endpoint=wanted.hub).model_info(
        wanted.repository, revision=wanted.revision, files_metadata=True, timeout=30
    )
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return _Listing(
        commit=str(info.sha), sizes={name: sizes[name] for name in sorted(sizes) if "/" not in name}
    )


def _is_text(name: str) -> bool:
    return name.startswith(_PAPERS) or (
        name.endswith(_TEXTS) and (name == INDEX_NAME or not name.endswith(".index.json"))
    )


def _check_texts(wanted: Wanted, texts: list[str]) -> tuple[str, ...]:
    """Check config and tokenizer. Returns notes. Raises `UserError`."""
    config = _read_json(wanted, "config.json")
    if not isinstance(config.get("architectures"), list):
        raise UserError(f"the config.json of {wanted.repository} names no architecture")
    if not any(name in texts for name in _TOKENIZERS):
        raise UserError(f"{wanted.repository} has no tokenizer ({', '.join(_TOKENIZERS)})")
    notes = []
    if "auto_map" in config:
        notes.append(
            "its config names code of its own (auto_map), which was not downloaded and is never "
            "run: it works only if the libraries know its architecture"
        )
    if "tokenizer.json" not in texts:
        notes.append("it has no tokenizer.json, so the routes under /v1 accept no text for it")
    return tuple(notes)


def _choose_weights(wanted: Wanted, listing: _Listing) -> list[str]:
    """Return the model's safetensors, without a second copy in another layout."""
    if INDEX_NAME in listing.sizes:
        places = _read_json(wanted, INDEX_NAME).get("weight_map")
        names = sorted({str(name) for name in cast(dict[str, object], places or {}).values()})
    else:
        names = [SINGLE_NAME]
    if gone := [name for name in names if name not in listing.sizes]:
        pickle = next((name for name in listing.sizes if name.endswith(PICKLES)), "")
        instead = f"; it has {pickle}, but pickles can run code and are not loaded"
        raise UserError(f"{wanted.repository} has no {gone[0]}{instead if pickle else ''}")
    if not names or not all(name.endswith(".safetensors") for name in names):
        raise UserError(f"the {INDEX_NAME} of {wanted.repository} names no safetensors")
    return names


def _read_json(wanted: Wanted, name: str) -> dict[str, object]:
    try:
        content = json.loads((wanted.folder / name).read_bytes())
    except ValueError as error:
        raise UserError(f"the {name} of {wanted.repository} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _fetch(wanted: Wanted, listing: _Listing, files: list[str], *, show: Show) -> int:
    """Return the downloaded bytes."""
    from glob import escape

    from huggingface_hub import snapshot_download

    before, total = _bytes_there(wanted.folder, files), listing.total(files)
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(
            snapshot_download,
            wanted.repository,
            revision=listing.commit,
            endpoint=wanted.hub,
            local_dir=wanted.folder,
            allow_patterns=[escape(name) for name in files],
        )
        while wait([fetching], timeout=1.0).not_done:
            show(_bytes_there(wanted.folder, files), total)
        fetching.result()
    show(total, total)
    return max(0, _bytes_there(wanted.folder, files) - before)


def _bytes_there(folder: Path, files: list[str]) -> int:
    """Count unfinished files too."""
    paths = [folder / name for name in files]
    return sum(map(_written, [*paths, *(folder / _PARTS).glob("*.incomplete")]))


def _written(path: Path) -> int:
    """Return a file's bytes on disk, without reserved ones."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0
    return min(status.st_size, status.st_blocks * 512)


def _verify(wanted: Wanted, listing: _Listing, files: list[str]) -> None:
    """Remove files that differ from the hub's, and raise `ServerError`."""
    from huggingface_hub import HfApi

    compared = HfApi(endpoint=wanted.hub).verify_repo_checksums(
        wanted.repository, revision=listing.commit, local_dir=wanted.folder
    )
    wrong = [found["path"] for found in compared.mismatches if found["path"] in files]
    wrong += [name for name in compared.missing_paths if name in files]
    for name in wrong:
        (wanted.folder / name).unlink(missing_ok=True)
    if wrong:
        raise ServerError(
            f"of {wanted.repository}, {', '.join(wrong)} differed from the hub's checksums and was "
            f"removed; {_AGAIN}"
        )


def _write_record(folder: Path, record: ModelRecord, files: list[str]) -> None:
    for name in files:
        fsync_path(folder / name)
    partial = folder / f"{RECORD_NAME}.partial"
    partial.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
    fsync_path(partial)
    partial.rename(folder / RECORD_NAME)
    fsync_path(folder)


@contextmanager
def _locked(wanted: Wanted) -> Iterator[None]:
    """Make the directory if needed. Raises `UserError` if another process has the lock."""
    lock = wanted.directory / ".locks" / wanted.name.replace("/", "--")
    lock.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, 200, 0).decode(errors="replace")
            raise UserError(
                f"{wanted.name} is being downloaded into {wanted.directory} already, by {holder}"
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} of {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(fd)


def _check_folder(folder: Path) -> None:
    """Raise `UserError` if the folder has files of another origin."""
    if folder.is_dir() and not (folder / _PARTS).is_dir() and any(folder.iterdir()):
        raise UserError(
            f"{folder} has files that `tandem models add` did not make; give the model another "
            "name with --name, or register the folder with `tandem models add NAME PATH`"
        )


def _remove_rests(folder: Path) -> None:
    """The library does not resume parts that a killed process left."""
    for part in (folder / _PARTS).glob("*.incomplete"):
        part.unlink()


def _choose_cache(directory: Path) -> None:
    """Configure the library before its import: a writable cache folder, no progress bars, no logs.

    In a container, the home folder may not be writable."""
    home = Path(os.environ.get("HF_HOME") or os.environ.get("HOME", "/")).absolute()
    nearest = next(path for path in (home, *home.parents) if path.exists())
    if not os.access(nearest, os.W_OK):
        os.environ["HF_HOME"] = str(directory / ".huggingface")
    from huggingface_hub.utils import disable_progress_bars, logging

    disable_progress_bars()
    logging.set_verbosity_error()


@contextmanager
def _as_sentences(wanted: Wanted) -> Iterator[None]:
    """Turn the library's errors into errors that name the remedy."""
    from huggingface_hub import errors

    hub, what = wanted.hub, wanted.repository
    try:
        yield
    except errors.GatedRepoError as error:
        raise UserError(
            f"{what} is gated: {_token()} it must be a token of an account that was granted "
            f"access at {hub}/{what}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise _refusal(wanted, 404) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{what} has no revision {wanted.revision!r} at {hub}") from error
    except errors.HFValidationError as error:
        raise UserError(f"{what[:200]!r} is no model's name: ORG/NAME") from error
    except errors.HfHubHTTPError as error:
        raise _refusal(wanted, error.response.status_code) from error
    except errors.LocalEntryNotFoundError as error:
        if isinstance(cause := error.__cause__, errors.HfHubHTTPError):
            raise _refusal(wanted, cause.response.status_code) from error
        raise ServerError(f"{hub} cannot be reached: {_line(cause or error)}; {_AGAIN}") from error
    except (errors.HTTPError, errors.OfflineModeIsEnabled) as error:
        raise ServerError(f"{hub} cannot be reached: {_line(error)}; {_AGAIN}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"{wanted.directory} is full; {_AGAIN}") from error
        if error.errno is None:  # a file differs from the hub's size
            raise ServerError(f"{hub} sent something else: {_line(error)}; {_AGAIN}") from error
        raise


def _refusal(wanted: Wanted, status: int) -> UserError | ServerError:
    hub, what = wanted.hub, wanted.repository
    if status == 404 or (status == 401 and not _has_token()):
        return UserError(
            f"{hub} has no model {what}, or it is private: {_token()} a private model needs a "
            "token that may read it"
        )
    if status == 401:
        return UserError(f"{hub} refuses HF_TOKEN (401): it is wrong or has expired")
    if status == 403:
        return UserError(f"{hub} does not let this account have {what} (403)")
    if status == 429:
        return ServerError(f"{hub} wants fewer requests (429); wait some minutes, {_AGAIN}")
    return ServerError(f"{hub} has a problem of its own ({status}); {_AGAIN}")


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _token() -> str:
    return "HF_TOKEN is set, but" if _has_token() else "HF_TOKEN is not set;"


def _line(error: BaseException) -> str:
    return describe(error).partition("\n")[0][:300]
