"""Builds, checks and parses names of sessions, runs, checkpoints, requests and files."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from tandem.errors import (
    InvalidRequest,
    UnknownRequest,
    UnknownRun,
    UnknownSampler,
    UnknownWeights,
    UnsupportedInput,
)
from tandem.settings.chosen_names import is_run_id, model_name_fault, name_fault
from tandem.weights.store import version_path

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: tuple[CheckpointKind, ...] = get_args(CheckpointKind)

SHORTEST_TTL = 3600
LONGEST_TTL = 315_576_000
"""Seconds: an hour, and ten years."""


@dataclass(frozen=True)
class CheckpointPath:
    """Example: `tinker://s-ab12:train:0/weights/warm-up`."""

    run_id: str
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"


def new_session_id() -> str:
    return f"s-{secrets.token_hex(6)}"


def run_id_of(*, session_id: str, model_seq_id: int) -> str:
    return f"{session_id}:train:{model_seq_id}"


def sampling_session_id_of(*, session_id: str, number: int) -> str:
    return f"{session_id}:sample:{number}"


def request_id_of(*, owner: str, seq_id: int) -> str:
    """Return a request id of a run or a sampling session: `s-ab12:train:0:17`."""
    return f"{owner}:{seq_id}"


def split_request_id(request_id: str) -> tuple[str, int] | None:
    """Return the owner and the seq_id, None for any other text."""
    owner, _, number = request_id.rpartition(":")
    # ASCII digits only, since other scripts' digits would give a request many names.
    if not owner or not re.fullmatch(r"[0-9]{1,19}", number) or int(number) >= 2**63:
        return None
    return owner, int(number)


def check_name(name: str) -> str:
    """Return a checkpoint's name, part of a folder's name. Raises `InvalidRequest`."""
    if why := name_fault(name):
        raise InvalidRequest(why)
    return name


def check_model_name(name: str) -> None:
    """Raise `InvalidRequest` for an invalid name of a base model."""
    if why := model_name_fault(name):
        raise InvalidRequest(why)


def split_model_name(name: str) -> tuple[str, bool]:
    """Return the registered name, and whether it requests full-parameter training.

    Example: `"tiny:full"` gives `("tiny", True)`. Raises `UnsupportedInput` for other
    suffixes."""
    base, colon, suffix = name.partition(":")
    if colon and suffix != "full":
        raise UnsupportedInput(
            f"the suffix {suffix!r} of the model name {name!r} is unknown; "
            "known: full (full-parameter training)"
        )
    return base, bool(colon)


def check_ttl(ttl_seconds: int | None) -> None:
    """Raise `InvalidRequest` for an expiry that is too short or too long."""
    if ttl_seconds is not None and not SHORTEST_TTL <= ttl_seconds <= LONGEST_TTL:
        raise InvalidRequest(
            f"ttl_seconds is {ttl_seconds}; it must be from {SHORTEST_TTL} (an hour) to "
            f"{LONGEST_TTL} (ten years), or absent for a checkpoint that does not expire"
        )


def parse_checkpoint_path(path: str) -> CheckpointPath:
    """Parse a checkpoint path. Raises `InvalidRequest` for malformed text, `UnknownWeights` for an
    unknown kind.

    A parsed path cannot lead out of a folder: run and name contain no slash and begin with no dot.
    """
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) != 3 or not all(parts):
        raise InvalidRequest(
            f"{path[:400]!r} is not a checkpoint path; it should look like "
            "tinker://RUN/weights/NAME"
        )
    run_id, kind, name = parts
    return make_checkpoint_path(run_id=run_id, kind=kind, name=name)


def make_checkpoint_path(*, run_id: str, kind: str, name: str) -> CheckpointPath:
    """Check the parts and build a path. Raises as `parse_checkpoint_path`."""
    known = next((k for k in KINDS if k == kind), None)
    if known is None:
        raise UnknownWeights(f"{kind[:100]!r} is no kind of checkpoint; known: {', '.join(KINDS)}")
    if not is_run_id(run_id):
        raise InvalidRequest(f"{run_id[:140]!r} is not the id of a training run")
    return CheckpointPath(run_id=run_id, kind=known, name=check_name(name))


def run_folder_name(run_id: str) -> str:
    """Return a run id as the name of a folder: `s-ab12_train_0`."""
    return run_id.replace(":", "_")


def operation_blob(data_dir: Path, *, run_id: str, seq_id: int) -> Path:
    return data_dir / "operations" / run_folder_name(run_id) / str(seq_id)


def result_blob(data_dir: Path, *, request_id: str) -> Path:
    return data_dir / "results" / run_folder_name(request_id)


def new_state_folder(*, run_id: str, name: str, suffix: str = "") -> str:
    """Return a new folder for a trainer's state, relative to the data directory:
    `checkpoints/s-ab12_train_0/warm-up-9f2c41d0`. It ends in a random or given suffix, because an
    overwritten name keeps the old folder until the new one is complete."""
    return f"checkpoints/{run_folder_name(run_id)}/{name}-{suffix or secrets.token_hex(4)}"


@lru_cache(1024)  # every sample asks for it
def relative_version_folder(name: str) -> str:
    """Return a weight version's folder, relative to the data directory:
    `weights/s-ab12_train_0/v000003-9f2c41d0`."""
    return str(version_path(Path(), name))


def unknown_run(run_id: str) -> UnknownRun:
    return UnknownRun(
        f"there is no training run {run_id!r} on this server, or it is another owner's; "
        "`tandem runs list` shows yours"
    )


def unknown_sampler(sampler_id: str) -> UnknownSampler:
    return UnknownSampler(
        f"there is no sampling session {sampler_id!r} on this server, or it is another owner's; "
        "make a new SamplingClient"
    )


def unknown_request(request_id: str) -> UnknownRequest:
    return UnknownRequest(
        f"there is no request {request_id!r} on this server, it is another owner's, or its result "
        "is no longer kept; send it again"
    )
