"""The options of a run: the `tandem.…` names in the `user_metadata` of runs and sessions.

A value of the run counts before one of its session. Both count before the defaults of the model
(`TANDEM_MODEL_DEFAULTS`), and these before the settings of the gateway. The options are settled
when the run is created."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError

from gateway.workers.groups import WorkerGroup
from gateway.workers.requests import Kind
from tandem.backends.registry import REFUSED
from tandem.errors import InvalidRequest, PermissionDenied
from tandem.protocol.worker import Layout, TrainingSpec
from tandem.settings.gateway import GatewaySettings
from tandem.settings.sharing import Share, Sharing
from tandem.settings.workers import TrainerSettings

_PREFIX = "tandem."
_LONGEST_START = 3600.0
_LONGEST_DEADLINE = 10 * 366 * 86_400.0
"""Seconds: ten years."""
_COMPILING = 600.0
"""Seconds that a first compilation adds to a start: minutes on a busy machine."""
_READ_ELSEWHERE = ("blueprint", "recovery")
"""Names that other code reads."""


def _between(least: int, most: int) -> Any:
    return Field(ge=least, le=most, description=f"a whole number from {least} to {most}")


def _samples(value: object) -> bool:
    if value == "none":
        return False
    if isinstance(value, bool):
        return value
    raise ValueError


def _deadline(value: object) -> str:
    """Check seconds, or a moment with its time zone. "" is none."""
    text = str(value)
    try:
        seconds = float(text)
    except ValueError:
        if text and datetime.fromisoformat(text).tzinfo is None:
            raise
        return text
    if not 0 < seconds <= _LONGEST_DEADLINE:
        raise ValueError
    return text


_Size = Annotated[
    ByteSize, Field(le=2**60, description="a number of bytes, such as 17179869184 or 16GiB")
]


class RunOptions(BaseModel):
    """The options of a run for its trainer and its session's sampler.

    With `sampler` False, the run only trains. `replicas` engines serve the session, each with
    `sampler_ranks` devices. Unless `max_replicas` is 0, their number follows the queue, from
    `min_replicas` on. `shards` of the `ranks` hold one copy of the model. None means the
    ranks of a node, until it is settled. Of the shards, `tensor_parallel` ranks divide the matrices
    and compute the same datums. `share` says when a LoRA run shares a trainer and its engines.
    `sharing` says how other runs share its devices, where None means as its groups say.
    Without a group, all groups are allowed. The run ends at its `deadline`. Of its saved
    states, the newest `keep_states` stay, 0 for all. The sizes are bytes on each device and on the
    host. 0 means that they are computed. A description names the allowed values, for errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ranks: Annotated[int, _between(1, 1024)] = 1
    shards: Annotated[int | None, _between(1, 1024)] = None
    tensor_parallel: Annotated[int, _between(1, 64)] = 1
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    states: Literal["float32", "bfloat16"] = "float32"
    offload: Literal["none", "moments", "weights"] = "none"
    compile: Literal["auto", "on", "off"] = "off"
    backend: str = Field(
        "fsdp2", min_length=1, max_length=100, description="the name of a trainer backend"
    )
    group: str = Field("", description="the name of a group for trainers")
    sampler_group: str = Field("", description="the name of a group for samplers")
    sampler: Annotated[bool, BeforeValidator(_samples)] = Field(
        True, description="none, for a run that only trains"
    )
    memory: _Size = ByteSize(0)
    host_memory: _Size = ByteSize(0)
    sampler_memory: _Size = ByteSize(0)
    sampler_host_memory: _Size = ByteSize(0)
    share: Share = "when_full"
    sharing: Sharing | None = Field(None, description=", ".join(Sharing))
    start_timeout: float = Field(300.0, gt=0, description=f"seconds, {_LONGEST_START:g} at most")
    replicas: Annotated[int, _between(1, 64)] = 1
    min_replicas: Annotated[int, _between(0, 64)] = 1
    max_replicas: Annotated[int, _between(0, 64)] = 0
    sampler_ranks: Annotated[int, _between(1, 64)] = 1
    priority: Annotated[int, _between(-10, 10)] = 0
    deadline: Annotated[str, BeforeValidator(_deadline)] = Field(
        "",
        description="a number of seconds above 0 from the run's creation, or a moment with its "
        "time zone, such as 2026-12-24T18:00:00Z",
    )
    keep_states: Annotated[int, _between(0, 10_000)] = 0

    def deadline_at(self, created_at: float) -> float | None:
        """Return the deadline of a run in seconds since 1970, None for no deadline."""
        if not self.deadline:
            return None
        try:
            return created_at + float(self.deadline)
        except ValueError:
            return datetime.fromisoformat(self.deadline).timestamp()

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
        layout = Layout(
            replicas=self.ranks // (self.shards or self.ranks),
            tensor_parallel=self.tensor_parallel,
        )
        return training.model_copy(
            update={"states": self.states, "offload": self.offload, "layout": layout}
        )


def default_options(settings: GatewaySettings) -> RunOptions:
    return RunOptions(
        ranks=settings.trainer.ranks,
        sampler_ranks=settings.sampler.ranks,
        dtype=settings.trainer.dtype,
        backend=settings.trainer.backend,
        share=settings.sharing.lora_runs,
        start_timeout=settings.worker_start_timeout,
    )


def options_of(
    run: Mapping[str, object] | None,
    session: Mapping[str, object] | None,
    *,
    model: str,
    settings: GatewaySettings,
    groups: Sequence[WorkerGroup],
    admin: bool,
    training: TrainingSpec | None = None,
) -> RunOptions:
    """Return the options in the `user_metadata` of a run and its session, without those that do not
    apply to its `training`. Without `training`, they are for a sampler alone.

    Raises `InvalidRequest` for an unknown name or value, and if no group can meet the request.
    Raises `PermissionDenied` for options of administrators."""
    options = default_options(settings)
    for changes, where in (
        (settings.model_defaults.get(model, {}), f"TANDEM_MODEL_DEFAULTS of {model}"),
        (_named_in(session), "user_metadata of the session"),
        (_named_in(run), "user_metadata"),
    ):
        options = _changed(options, changes, where)
    if 0 < options.max_replicas < max(options.min_replicas, options.replicas):
        raise InvalidRequest(
            f"{_PREFIX}max_replicas is {options.max_replicas}, which is below "
            f"{_PREFIX}min_replicas ({options.min_replicas}) or {_PREFIX}replicas "
            f"({options.replicas})"
        )
    if options.priority > 0 and not admin:
        raise PermissionDenied(
            f"{_PREFIX}priority is {options.priority}: above 0 it is for administrators"
        )
    trains = training is not None
    trainers = _check_groups(options, groups, lambda name: _PREFIX + name, trains=trains)
    if is_kept_apart(options, groups, trains=trains):
        options = options.model_copy(update={"share": "never"})
    if training is None:
        return options
    options = options.model_copy(update={"shards": _shards_of(options, trainers)})
    if (options.shards or 1) % options.tensor_parallel:
        raise InvalidRequest(
            f"{_PREFIX}tensor_parallel is {options.tensor_parallel}, and the {options.shards} "
            f"ranks that hold a copy of the model ({_PREFIX}shards) are not a multiple of it"
        )
    return _that_apply(options, training, _named_in(run))


def check_defaults(settings: GatewaySettings, groups: Sequence[WorkerGroup]) -> None:
    """Raise `InvalidRequest` for default settings that no group can meet. A gateway without room
    for a trainer or an engine does not start."""
    usual = default_options(settings)
    variables = {
        "backend": "TANDEM_TRAINER_BACKEND",
        "ranks": "TANDEM_TRAINER_RANKS, or --ranks of the demo",
        "sampler_ranks": "TANDEM_SAMPLER_RANKS",
    }
    _check_groups(usual, groups, lambda name: variables.get(name, _PREFIX + name))
    for model, defaults in settings.model_defaults.items():
        where = f"TANDEM_MODEL_DEFAULTS of {model}"
        name_of = f"{where}: {_PREFIX}{{}}".format
        _check_groups(_changed(usual, defaults, where), groups, name_of)


def sampled_on_cpu(options: RunOptions, groups: Sequence[WorkerGroup]) -> bool:
    """Whether all allowed groups of a session's engines compute on a CPU."""
    name = f"{_PREFIX}sampler_group"
    found = _allowed_groups(groups, "engine", options.sampler_group, name)
    return all(group.on_host and not group.pool for group in found)


def is_kept_apart(
    options: RunOptions, groups: Sequence[WorkerGroup], *, trains: bool = True
) -> bool:
    """Whether a run may get a group to itself, so that it shares no trainer and no engine."""
    allowed: dict[Kind, str] = {"trainer": options.group} if trains else {}
    if options.sampler or not trains:
        allowed["engine"] = options.sampler_group
    found = [
        group.sharing
        for group in groups
        if any(kind in group.kinds and group.is_meant_by(name) for kind, name in allowed.items())
    ]
    return Sharing.EXCLUSIVE in ([options.sharing] if options.sharing else found)


# --- Values ---------------------------------------------------------------------------------------


def _named_in(metadata: Mapping[str, object] | None) -> dict[str, object]:
    return {
        name: value
        for key, value in (metadata or {}).items()
        if key.startswith(_PREFIX) and (name := key.removeprefix(_PREFIX)) not in _READ_ELSEWHERE
    }


def _changed(options: RunOptions, changes: Mapping[str, object], where: str) -> RunOptions:
    fields = RunOptions.model_fields
    for name in changes:
        if name not in fields:
            known = ", ".join(_PREFIX + each for each in sorted((*fields, *_READ_ELSEWHERE)))
            raise InvalidRequest(f"{where}: {_PREFIX}{name[:40]} is unknown; known: {known}")
    wrong = ""
    try:
        changed = RunOptions.model_validate({**options.model_dump(), **changes})
        if changed.start_timeout > max(_LONGEST_START, options.start_timeout):
            wrong = "start_timeout"
    except ValidationError as error:
        wrong = str(error.errors()[0]["loc"][0])
    if wrong:
        value = str(changes[wrong])[:40]
        raise InvalidRequest(f"{where}: {_PREFIX}{wrong} is {value!r}; it is {_allowed(wrong)}")
    return changed


def _allowed(name: str) -> str:
    """Literal examples: "a whole number from 1 to 64", "auto, on or off"."""
    field = RunOptions.model_fields[name]
    if field.description:
        return field.description
    *others, last = get_args(field.annotation)
    return f"{', '.join(others)} or {last}"


def _shards_of(options: RunOptions, groups: Sequence[WorkerGroup]) -> int:
    """Return the number of ranks that hold one copy of the model. Unless the run says it, these are
    the ranks of one node, on the `groups` that suit. Raises `InvalidRequest`."""
    ranks = options.ranks
    if options.shards is None:
        if options.backend != RunOptions.model_fields["backend"].default:
            return ranks  # it may know a single copy only
        return min(
            ranks // group.nodes_for(ranks) for group in groups if group.has_devices_for(ranks)
        )
    if ranks % options.shards:
        raise InvalidRequest(
            f"{_PREFIX}shards is {options.shards}, and {ranks} ranks ({_PREFIX}ranks) cannot be "
            f"divided into copies of the model with {options.shards} each: {_PREFIX}shards is one "
            f"of {', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}"
        )
    return options.shards


def _that_apply(
    options: RunOptions, training: TrainingSpec, of_run: Mapping[str, object]
) -> RunOptions:
    """Return the options with the defaults of those that do not apply to this training.

    States of adapters and of dimuon are in float32 on the device. Frozen weights under adapters may
    be offloaded. Such options of a session or a model are ignored. Raises `InvalidRequest` for
    those of the run itself."""
    if training.lora is None and training.optimizer == "adamw":
        return options
    names = ["states", "offload"]
    if training.lora is not None and options.offload == "weights":
        names.remove("offload")
    usual = {name: RunOptions.model_fields[name].default for name in names}
    for name in names:
        value = getattr(options, name)
        if name in of_run and value != usual[name]:
            trained = "adapters" if training.lora is not None else "by dimuon"
            raise InvalidRequest(
                f"{_PREFIX}{name} is {value}, which is for runs that train all parameters by "
                f"AdamW, and this one trains {trained}: its states are in float32 on the device"
            )
    return options.model_copy(update=usual)


# --- Groups ---------------------------------------------------------------------------------------


def _check_groups(
    options: RunOptions,
    groups: Sequence[WorkerGroup],
    name_of: Callable[[str], str],
    *,
    trains: bool = True,
) -> list[WorkerGroup]:
    """Return the allowed groups of the trainer. `name_of` is the user's name of an option.

    Raises `InvalidRequest` for a trainer backend that is absent or unusable, and if no
    allowed group has enough devices."""
    trainers = _allowed_groups(groups, "trainer", options.group, name_of("group"))
    trainers = _offering(trainers, options.sharing, name_of("sharing"))
    if reason := REFUSED.get(options.backend):
        raise InvalidRequest(f"{name_of('backend')}: {reason}")
    known = {each: why for group in trainers for each, why in group.backends.items()}
    if known and options.backend not in known:
        raise InvalidRequest(
            f"{name_of('backend')} is {options.backend[:64]!r}, which is no trainer backend; "
            f"known: {', '.join(each for each, why in known.items() if not why)}"
        )
    if reason := known.get(options.backend):
        raise InvalidRequest(f"{name_of('backend')}: {reason}")
    if trains:
        worker = f"a trainer with {options.ranks} ranks ({name_of('ranks')})"
        _check_devices(options.ranks, trainers, worker)
    if options.sampler:
        name = name_of("sampler_group")
        engines = _allowed_groups(groups, "engine", options.sampler_group, name)
        engines = _offering(engines, options.sharing, name_of("sharing"))
        worker = f"an engine on {options.sampler_ranks} devices ({name_of('sampler_ranks')})"
        _check_devices(options.sampler_ranks, engines, worker)
    return trainers


def _check_devices(ranks: int, groups: Sequence[WorkerGroup], worker: str) -> None:
    if not any(group.has_devices_for(ranks) for group in groups):
        there = ", ".join(dict.fromkeys(group.describe_devices() for group in groups))
        raise InvalidRequest(
            f"{worker} needs a group with as many devices; there is: {there}; ask for fewer"
        )


def _offering(
    groups: Sequence[WorkerGroup], sharing: Sharing | None, name: str
) -> list[WorkerGroup]:
    """Return the groups whose devices may be shared so. Raises `InvalidRequest` without one."""
    found = [group for group in groups if group.offers(sharing)]
    if not found:
        known = [each for each in Sharing if any(group.offers(each) for group in groups)]
        there = ", ".join(dict.fromkeys(group.family for group in groups))
        raise InvalidRequest(
            f"{name} is {sharing}, which the groups {there} do not offer; known: "
            f"{', '.join(known)}. An administrator declares another one (`sharing` in "
            "TANDEM_GROUPS or TANDEM_CLAIM_POOLS)"
        )
    return found


def _allowed_groups(
    groups: Sequence[WorkerGroup], kind: Kind, chosen: str, name: str
) -> list[WorkerGroup]:
    """Return the groups for a kind of workers, or only those with the chosen name."""
    suiting = [group for group in groups if kind in group.kinds]
    found = [group for group in suiting if group.is_meant_by(chosen)]
    if not found:
        workers = "trainers" if kind == "trainer" else "samplers"
        known = ", ".join(dict.fromkeys(group.family for group in suiting))
        raise InvalidRequest(
            f"{name} is {chosen[:64]!r}, which is no group for {workers}; known: {known}"
        )
    return found
