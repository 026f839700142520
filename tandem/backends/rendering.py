"""From a job's values to its configuration, and to the command of its worker."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path, PurePath

from pydantic import ValidationError

from tandem.backends.description import BackendDescription
from tandem.backends.frameworks import Framework, framework_missing, own_environment
from tandem.backends.jobs import JobConfiguration, JobPaths
from tandem.errors import InvalidField, UnsupportedByBackend
from tandem.protocol.worker import JobSpec

_IGNORES_PET = (
    "does not read the PET_ variables with the job's ranks, so each process would train alone; "
    "start the ranks with `python -m torch.distributed.run`"
)


def configure(backend: BackendDescription, values: Mapping[str, object]) -> JobConfiguration:
    """Check a job's settings. Raises `InvalidField` for the first faulty one."""
    try:
        return backend.job_configuration.model_validate(dict(values))
    except ValidationError as error:
        raise _invalid_field(error, backend) from None


def job_paths(
    backend: BackendDescription, *, folder: str, model: str, frameworks: Mapping[str, Framework]
) -> JobPaths:
    """Return the places of a job in its worker, whose host has these `frameworks`.

    They are empty if nobody knows them, as for pods. Then Tandem has the same folder there as here.
    So it is with the program. Raises `FrameworkMissing`."""
    python = str(own_environment(backend.framework) / "bin" / "python")
    if frameworks:
        if backend.framework not in frameworks:
            raise framework_missing(backend.framework)
        python = frameworks[backend.framework].python
    program = Path(__file__).parents[2] / "trainer_service" / "jobs" / backend.name
    return JobPaths(python=python, program=str(program), folder=folder, model=model)


def render_job(
    backend: BackendDescription, configuration: JobConfiguration, paths: JobPaths, processes: int
) -> JobSpec:
    """Return the first attempt of a job. Raises `UnsupportedByBackend` for a command that cannot
    run several ranks, or that is not text."""
    command = configuration.command(paths)
    argv, environment = (*command, *configuration.args(paths)), configuration.environment(paths)
    for text in (*argv, *environment, *environment.values()):
        if not isinstance(text, str) or "\0" in text:
            raise UnsupportedByBackend(
                f"the trainer backend {backend.name} renders {text!r}, which is no text of a "
                "command"
            )
    if any(map(_is_accelerate, " ".join(command).split())):
        raise UnsupportedByBackend(
            f"the trainer backend {backend.name} starts `accelerate launch`, which {_IGNORES_PET}"
        )
    return JobSpec(
        framework=backend.framework,
        folder=paths.folder,
        processes=processes,
        argv=argv,
        environment=environment,
    )


def job_request(
    *,
    backend: str,
    configuration: Mapping[str, object],
    model: str,
    folder: str,
    attempt: int,
    processes: int,
) -> dict[str, object]:
    """Return the content of `job.json`, which the program reads. `processes` are those of all
    nodes."""
    return {
        "backend": backend,
        "configuration": dict(configuration),
        "model": model,
        "folder": folder,
        "attempt": attempt,
        "processes": processes,
    }


def _is_accelerate(word: str) -> bool:
    return PurePath(word).name == "accelerate" or word.startswith("accelerate.commands")


def _invalid_field(error: ValidationError, backend: BackendDescription) -> InvalidField:
    fault = error.errors(include_url=False)[0]
    raised = fault.get("ctx", {}).get("error")
    if isinstance(raised, InvalidField):  # from a validator of the configuration
        return raised
    field = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden":
        close = get_close_matches(field, backend.job_configuration.model_fields, n=1)
        advice = f"did you mean {close[0]}?" if close else "`tandem backends --json` lists them"
        return InvalidField(
            f"{field[:100]!r} is no setting of {backend.name}; {advice}", field=field
        )
    return InvalidField(f"{field}: {fault['msg'].removeprefix('Value error, ')}", field=field)
