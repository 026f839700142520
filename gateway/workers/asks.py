"""Asks: the wishes of users, as `tandem.…` names in the `user_metadata` of runs and sessions.

A value of the run counts before one of its session. Both count before the defaults of the model
(`TANDEM_MODEL_DEFAULTS`), and these before the settings of the gateway. The wishes are settled when
the run is created."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError

from gateway.workers.groups import WorkerGroup
from gateway.workers.requests import Kind
from tandem.errors import InvalidRequest, PermissionDenied
from tandem.protocol.worker import Layout, TrainingSpec
from tandem.settings.gateway import GatewaySettings
from tandem.settings.sharing import Share
from tandem.settings.workers import TrainerSettings

_PREFIX = "tandem."
_LONGEST_START = 3600.0
_COMPILING = 600.0
"""Seconds that a first compilation adds to a start: minutes on a busy machine."""
_SIZE = "a number of bytes, such as 17179869184 or 16GiB"
_LARGEST_SIZE = 2**60

_ALLOWED: Mapping[str, str] = {
    "ranks": "a whole number from 1 to 1024",
    "shards": "a whole number from 1 to 1024",
    "tensor_parallel": "a whole number from 1 to 64",
    "dtype": "auto, float32 or bfloat16",
    "states": "float32 or bfloat16",
    "offload": "none, moments or weights",
    "compile": "auto, on or off",
    "delta": "auto, on or off",
    "backend": "the name of a trainer backend",
    "group": "the name of a group for trainers",
    "sampler_group": "the name of a group for samplers",
    "replicas": "a whole number from 1 to 64",
    "sampler_ranks": "a whole number from 1 to 64",
    "sampler": "none, for a run that only trains",
    "memory": _SIZE,
    "host_memory": _SIZE,
    "sampler_memory": _SIZE,
    "sampler_host_memory": _SIZE,
    "share": "when_full, always or never",
    "start_timeout": f"seconds, {_LONGEST_START:g} at most",
    "priority": "a whole number from -10 to 10",
}
_ROLES: Mapping[Kind, str] = {"trainer": "trainer", "engine": "sampler"}
"""The words of users for kinds of workers."""
_OF_RUNS_ALONE = ("recovery",)
"""Names that other code reads."""


_Size = Annotated[ByteSize, Field(le=_LARGEST_SIZE)]


def _sampler(value: object) -> object:
    return False if value == "none" else value


class Asks(BaseModel):
    """The wishes of a run for its trainer and its session's sampler.

    With `sampler` False, the run only trains. `replicas` engines serve the session, each with
    `sampler_ranks` devices. `shards` of the `ranks` hold one copy of the model. None means the
    ranks of a node, until it is settled. Of the shards, `tensor_parallel` ranks divide the matrices
    and compute the same datums. `share` says when a LoRA run shares a trainer and its engines.
    Without a group, all groups are allowed. The sizes are bytes on each device and on the host. 0
    means that they are computed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ranks: int = Field(1, ge=1, le=1024)
    shards: int | None = Field(None, ge=1, le=1024)
    tensor_parallel: int = Field(1, ge=1, le=64)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    states: Literal["float32", "bfloat16"] = "float32"
    offload: Literal["none", "moments", "weights"] = "none"
    compile: Literal["auto", "on", "off"] = "off"
    delta: Literal["auto", "on", "off"] = "auto"
    backend: Annotated[str, Field(min_length=1, max_length=100)] = "fsdp2"
    group: str = ""
    sampler_group: str = ""
    sampler: Annotated[bool, BeforeValidator(_sampler)] = True
    memory: _Size = ByteSize(0)
    host_memory: _Size = ByteSize(0)
    sampler_memory: _Size = ByteSize(0)
    sampler_host_memory: _Size = ByteSize(0)
    share: Share = "when_full"
    start_timeout: float = Field(300.0, gt=0)
    replicas: int = Field(1, ge=1, le=64)
    sampler_ranks: int = Field(1, ge=1, le=64)
    priority: int = Field(0, ge=-10, le=10)

    def trainer_settings(self, settings: GatewaySettings) -> TrainerSettings:
        """Return the settings of the run's trainer."""
        usual = TrainerSettings.of(settings.trainer, operation_timeout=settings.operation_timeout)
        return usual.model_copy(
            update={
                "ranks": self.ranks,
                "dtype": self.dtype,
                "compile": self.compile,
                "backend": self.backend,
                "memory_bytes": self.memory or usual.memory_bytes,
            }
        )

    @property
    def trainer_start_timeout(self) -> float:
        """Seconds, with the time to compile."""
        return self.start_timeout + (0.0 if self.compile == "off" else _COMPILING)

    def training(self, training: TrainingSpec) -> TrainingSpec:
        """Return the training with the wanted states and layout."""
        return training.model_copy(
            update={
                "states": self.states,
                "offload": self.offload,
                "layout": Layout(
                    replicas=self.ranks // (self.shards or self.ranks),
                    tensor_parallel=self.tensor_parallel,
                ),
            }
        )


def default_asks(settings: GatewaySettings) -> Asks:
    """Return the asks of a run without any wishes."""
    return Asks(
        ranks=settings.trainer.ranks,
        sampler_ranks=settings.sampler.ranks,
        dtype=settings.trainer.dtype,
        delta=settings.delta_versions,
        backend=settings.trainer.backend,
        share=settings.sharing.lora_runs,
        start_timeout=settings.worker_start_timeout,
    )


def asks_of(
    run: Mapping[str, object] | None,
    session: Mapping[str, object] | None,
    *,
    model: str,
    settings: GatewaySettings,
    groups: Sequence[WorkerGroup],
    admin: bool,
    training: TrainingSpec | None = None,
) -> Asks:
    """Return the asks in the `user_metadata` of a run and its session, without wishes that do not
    apply to its `training`. Without `training`, they are for a sampler alone.

    Raises `InvalidRequest` for an unknown name or value, and if no group can meet the request.
    Raises `PermissionDenied` for wishes of administrators."""
    asks = default_asks(settings)
    asks = _changed(
        asks, settings.model_defaults.get(model, {}), f"TANDEM_MODEL_DEFAULTS of {model}"
    )
    asks = _changed(asks, _asked(session), "user_metadata of the session")
    asks = _changed(asks, _asked(run), "user_metadata")
    if asks.priority > 0 and not admin:
        raise PermissionDenied(
            f"{_PREFIX}priority is {asks.priority}: above 0 it is for administrators"
        )
    trainers = _named(groups, "trainer", asks.group, "group")
    _check_backend(asks.backend, trainers, f"{_PREFIX}backend")
    if training is not None:
        _check_ranks(asks.ranks, trainers, f"{_PREFIX}ranks")
        asks = asks.model_copy(update={"shards": _shards_of(asks, trainers)})
        if (asks.shards or 1) % asks.tensor_parallel:
            raise InvalidRequest(
                f"{_PREFIX}tensor_parallel is {asks.tensor_parallel}, and the {asks.shards} ranks "
                f"that hold a copy of the model ({_PREFIX}shards) are not a multiple of it"
            )
    if asks.sampler:
        samplers = _named(groups, "engine", asks.sampler_group, "sampler_group")
        _check_sampler_ranks(asks.sampler_ranks, samplers, f"{_PREFIX}sampler_ranks")
    return asks if training is None else _with_what_applies(asks, training, run)


def sampled_on_cpu(asks: Asks, groups: Sequence[WorkerGroup]) -> bool:
    """Whether all allowed groups of a session's engines compute on a CPU."""
    found = _named(groups, "engine", asks.sampler_group, "sampler_group")
    return all(group.on_host and not group.pool for group in found)


def _check_ranks(ranks: int, groups: Sequence[WorkerGroup], name: str) -> None:
    """Raise `InvalidRequest` if no group has a device for each rank. `name` is that of the
    setting."""
    if not any(group.has_devices_for(ranks) for group in groups):
        raise InvalidRequest(
            f"a trainer with {ranks} ranks ({name}) needs a group with as many devices; there is: "
            f"{_described(groups)}; ask for fewer"
        )


def _check_sampler_ranks(ranks: int, groups: Sequence[WorkerGroup], name: str) -> None:
    if not any(group.has_devices_for(ranks) for group in groups):
        raise InvalidRequest(
            f"an engine on {ranks} devices ({name}) needs a group with as many; there is: "
            f"{_described(groups)}; ask for fewer"
        )


def _check_backend(backend: str, groups: Sequence[WorkerGroup], name: str) -> None:
    """Raise `InvalidRequest` for a trainer backend that is absent or was registered twice."""
    known = {each: why for group in groups for each, why in group.backends.items()}
    if known and backend not in known:
        raise InvalidRequest(
            f"{name} is {backend[:64]!r}, which is no trainer backend; known: {', '.join(known)}"
        )
    if reason := known.get(backend):
        raise InvalidRequest(f"{name}: {reason}")


def _described(groups: Sequence[WorkerGroup]) -> str:
    return ", ".join(dict.fromkeys(group.describe() for group in groups))


def _shards_of(asks: Asks, groups: Sequence[WorkerGroup]) -> int:
    """Return the number of ranks that hold one copy of the model. Unless the run says it, these are
    the ranks of one node, on the `groups` that suit. Raises `InvalidRequest`."""
    ranks = asks.ranks
    if asks.shards is None:
        if asks.backend != Asks.model_fields["backend"].default:  # may know a single copy only
            return ranks
        return min(
            ranks // group.nodes_for(ranks) for group in groups if group.has_devices_for(ranks)
        )
    if ranks % asks.shards:
        raise InvalidRequest(
            f"{_PREFIX}shards is {asks.shards}, and {ranks} ranks ({_PREFIX}ranks) cannot be "
            f"divided into copies of the model with {asks.shards} each: {_PREFIX}shards is one of "
            f"{', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}"
        )
    return asks.shards


def _with_what_applies(
    asks: Asks, training: TrainingSpec, run: Mapping[str, object] | None
) -> Asks:
    """Return the asks without wishes that do not apply to this training.

    States of adapters and of dimuon are in float32 on the device, and adapters are published whole.
    Frozen weights under adapters may be offloaded. Such wishes of a session or a model are ignored.
    Raises `InvalidRequest` for those of the run itself."""
    if training.lora is not None:
        if _asked(run).get("delta") == "on":
            raise InvalidRequest(
                f"{_PREFIX}delta is on, and this run trains adapters, which are published whole: "
                "deltas are for runs that train all parameters"
            )
        asks = asks.model_copy(update={"delta": "off"})
    if training.lora is None and training.optimizer == "adamw":
        return asks
    names = ["states", "offload"]
    if training.lora is not None and asks.offload == "weights":
        names.remove("offload")
    plain = asks.model_copy(update={name: Asks.model_fields[name].default for name in names})
    for name in names:
        value = getattr(asks, name)
        if name in _asked(run) and value != getattr(plain, name):
            trained = "adapters" if training.lora is not None else "by dimuon"
            raise InvalidRequest(
                f"{_PREFIX}{name} is {value}, which is for runs that train all parameters by "
                f"AdamW, and this one trains {trained}: its states are in float32 on the device"
            )
    return plain


def check_defaults(settings: GatewaySettings, groups: Sequence[WorkerGroup]) -> None:
    """Raise `InvalidRequest` for default settings that no group can meet. A gateway without room
    for a trainer or an engine does not start."""
    usual = default_asks(settings)
    trainers = _named(groups, "trainer", "", "group")
    samplers = _named(groups, "engine", "", "sampler_group")
    _check_backend(usual.backend, trainers, "TANDEM_TRAINER_BACKEND")
    _check_ranks(usual.ranks, trainers, "TANDEM_TRAINER_RANKS, or --ranks of the demo")
    _check_sampler_ranks(usual.sampler_ranks, samplers, "TANDEM_SAMPLER_RANKS")
    for model, defaults in settings.model_defaults.items():
        where = f"TANDEM_MODEL_DEFAULTS of {model}"
        asks = _changed(usual, defaults, where)
        _check_backend(asks.backend, trainers, f"{where}: {_PREFIX}backend")
        _check_ranks(asks.ranks, trainers, f"{where}: {_PREFIX}ranks")
        _check_sampler_ranks(asks.sampler_ranks, samplers, f"{where}: {_PREFIX}sampler_ranks")


def _asked(metadata: Mapping[str, object] | None) -> dict[str, object]:
    names = {key.removeprefix(_PREFIX): key for key in metadata or {} if key.startswith(_PREFIX)}
    return {
        name: (metadata or {})[key] for name, key in names.items() if name not in _OF_RUNS_ALONE
    }


def _changed(asks: Asks, changes: Mapping[str, object], where: str) -> Asks:
    for name in changes:
        if name not in _ALLOWED:
            known = ", ".join(_PREFIX + each for each in sorted((*_ALLOWED, *_OF_RUNS_ALONE)))
            raise InvalidRequest(f"{where}: {_PREFIX}{name[:40]} is unknown; known: {known}")
    try:
        changed = Asks.model_validate({**asks.model_dump(), **changes})
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        raise _refused(where, name, changes[name]) from error
    if changed.start_timeout > max(_LONGEST_START, asks.start_timeout):
        raise _refused(where, "start_timeout", changes["start_timeout"])
    if changes.get("sampler") not in (None, "none"):
        raise _refused(where, "sampler", changes["sampler"])
    return changed


def _refused(where: str, name: str, value: object) -> InvalidRequest:
    return InvalidRequest(
        f"{where}: {_PREFIX}{name} is {str(value)[:40]!r}; it is {_ALLOWED[name]}"
    )


def _named(groups: Sequence[WorkerGroup], kind: Kind, chosen: str, name: str) -> list[WorkerGroup]:
    """Return the groups for a kind of workers, or only those with the chosen name."""
    suiting = [group for group in groups if kind in group.kinds]
    found = [group for group in suiting if group.is_meant_by(chosen)]
    if not found:
        known = ", ".join(dict.fromkeys(group.family for group in suiting))
        raise InvalidRequest(
            f"{_PREFIX}{name} is {chosen[:64]!r}, which is no group for {_ROLES[kind]}s; known: "
            f"{known}"
        )
    return found
