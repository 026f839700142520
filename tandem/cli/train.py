"""`tandem train`: submits a job of another framework. `tandem jobs`: lists jobs, or shows one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

import typer
import yaml

from tandem.backends.jobs import JobResources
from tandem.backends.kubeflow import render_trainjob
from tandem.backends.registry import descriptions, job_backend
from tandem.backends.rendering import configure
from tandem.cli import run_show
from tandem.cli.context import (
    DataDir,
    JsonFlag,
    Row,
    call,
    end_if_json,
    print_json,
    read_pages,
    say,
    set_values,
)
from tandem.cli.run_names import run_in_url
from tandem.cli.run_values import done, main_value
from tandem.cli.tables import Column, duration, moment, printable, say_rest, show_table
from tandem.errors import InvalidField, JobFailed, UserError

_UPLOAD_SECONDS = 600.0


def train(
    what: Annotated[
        str,
        typer.Argument(metavar="BACKEND", help="A job backend with its method, such as trl-sft."),
    ],
    model: Annotated[str, typer.Option("--model", help="A base model; `tandem models list`.")],
    data: Annotated[
        str, typer.Option("--data", metavar="FILE", help="Rows, as JSON lines. See --render.")
    ],
    held_out: Annotated[
        Path | None,
        typer.Option("--eval", exists=True, dir_okay=False, help="Held-out rows, as JSON lines."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting; may be repeated."),
    ] = None,
    processes: Annotated[int, typer.Option("--processes", min=1, help="How many.")] = 1,
    name: Annotated[str, typer.Option("--name", help="The name of the job's run.")] = "",
    tags: Annotated[str, typer.Option("--tags", help="Its tags, with commas.")] = "",
    group: Annotated[str, typer.Option("--group", help="Only on this device group.")] = "",
    host_memory: Annotated[
        str, typer.Option("--host-memory", help="Of its pod, such as 24GiB. Default: estimated.")
    ] = "",
    priority: Annotated[int, typer.Option("--priority", help="From -10 to 10.")] = 0,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="Further attempts after failures.")
    ] = 0,
    deadline: Annotated[
        str, typer.Option("--deadline", help="Seconds from now, or a moment with its time zone.")
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print steps until the end or Ctrl-C.")
    ] = False,
    render: Annotated[
        Literal["trainjob"] | None,
        typer.Option(
            "--render",
            help="Submit nothing, and write a TrainJob of Kubeflow with its runtime. --model and "
            "--data are hf://OWNER/NAME or s3://BUCKET/PREFIX.",
        ),
    ] = None,
    image: Annotated[
        str, typer.Option("--image", help="For --render: built by deploy/trl.Dockerfile.")
    ] = "",
    initializers: Annotated[
        str,
        typer.Option(
            "--initializers",
            metavar="REGISTRY/FOLDER",
            help="For --render: the place of Kubeflow's images dataset-initializer and "
            "model-initializer.",
        ),
    ] = "",
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, help="For --render, each with --processes.")
    ] = 1,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option("--device", help="For --render, of each process.")
    ] = "cuda",
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a model with another framework, as a job.

    `tandem backends` lists frameworks, methods and settings. The job is a run, so `tandem runs`
    shows and stops it too. With --render, kubectl creates the job instead.

    Example: tandem train trl-sft --model tiny --data rows.jsonl --set learning_rate=1e-4"""
    if render is not None:
        without = {
            "--eval": held_out is not None,
            "--tags": bool(tags),
            "--group": bool(group),
            "--host-memory": bool(host_memory),
            "--priority": bool(priority),
            "--max-restarts": bool(max_restarts),
            "--deadline": bool(deadline),
            "--follow": follow,
        }
        if given := [option for option, used in without.items() if used]:
            raise UserError(f"{given[0]} is for Tandem's own queue; leave it out with --render")
        documents = _trainjob(
            what,
            settings or [],
            name=name,
            model=model,
            data=data,
            image=image,
            initializers=initializers,
            resources=JobResources(processes=processes, nodes=nodes, device=device),
        )
        end_if_json(as_json, documents)
        print(yaml.safe_dump_all(documents, sort_keys=False), end="")
        return
    if image or initializers or nodes > 1 or device != "cuda":
        raise UserError("--image, --initializers, --nodes and --device are for --render")
    backend, configuration = _configuration(
        what, call(data_dir, "GET", "backends")["backends"], settings or []
    )
    texts = {"train": Path(data).read_text(encoding="utf-8")}
    if held_out is not None:
        texts["eval"] = held_out.read_text(encoding="utf-8")
    body = {
        "backend": backend,
        "model": model,
        "configuration": configuration,
        "data": texts,
        "name": name or None,
        "tags": [tag.strip() for tag in tags.split(",") if tag.strip()],
        "processes": processes,
        "group": group,
        "host_memory": host_memory,
        "priority": priority,
        "max_restarts": max_restarts,
        "deadline": deadline,
    }
    job = call(data_dir, "POST", "jobs", body=body, timeout=_UPLOAD_SECONDS)
    if not follow:
        end_if_json(as_json, job)
        say(f"{job['id']} is {job['state']}. `tandem jobs {job['id']}` shows it.")
        return
    if as_json:
        print_json(job)
    else:
        say(f"{job['id']} is {job['state']}.")
    run_show.show(job["id"], follow=True, data_dir=data_dir, as_json=as_json)
    about = call(data_dir, "GET", f"jobs/{job['id']}")
    if about["state"] == "ended" and about["result"] is None:
        raise JobFailed(about["reason"])
    if about["result"] is not None and not as_json:
        _say_result(about)


def list_jobs(
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="An id or a name. Default: list them.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most this many.")] = 20,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """List jobs, newest first, or show one.

    Example: tandem jobs my-job"""
    if job is not None:
        about = call(data_dir, "GET", f"jobs/{run_in_url(data_dir, job)}")
        end_if_json(as_json, about)
        _say_job(about)
        return

    def ask(most: int, offset: int) -> tuple[list[Row], int]:
        answer = call(data_dir, "GET", f"jobs?{urlencode({'limit': most, 'offset': offset})}")
        return answer["jobs"], answer["total_count"]

    jobs, total = read_pages(ask, most=limit)
    end_if_json(as_json, {"jobs": jobs, "total_count": total})
    show_table(
        [
            Column("name", wrap=10),
            Column("id"),
            Column("framework"),
            Column("state"),
            Column("queue", right=True),
            Column("waits", right=True),
            Column("step", right=True),
            Column("newest", wrap=11),
            Column("done", wrap=5),
            Column("created", wrap=10),
            Column("owner"),
            Column("base_model"),
        ],
        [
            (
                each["name"],
                each["id"],
                each["framework"],
                each["state"],
                each["queue_position"] or "",
                duration(each["waited_seconds"]),
                (each["progress"] or {"step": 0})["step"],
                main_value(each),
                done(each),
                moment(each["created_at"]),
                each["owner"],
                each["base_model"],
            )
            for each in jobs
        ],
        empty="No jobs.",
    )
    say_rest(len(jobs), total, "jobs")


def _trainjob(
    what: str,
    settings: list[str],
    *,
    name: str,
    model: str,
    data: str,
    image: str,
    initializers: str,
    resources: JobResources,
) -> list[Row]:
    """Return the manifests of a job, with the backends of this machine. No gateway is asked."""
    for option, value in (("image", image), ("initializers", initializers)):
        if not value:
            raise InvalidField(f"--render needs --{option}: the cluster pulls it", field=option)
    known = [
        {"name": backend, "kind": "" if isinstance(about, str) else about.kind}
        for backend, about in descriptions().items()
    ]
    backend, configuration = _configuration(what, known, settings)
    described = job_backend(backend)
    return list(
        render_trainjob(
            described,
            configure(described, configuration),
            name=name or what,
            model=model,
            data=data,
            image=image,
            initializers=initializers,
            resources=resources,
        )
    )


def _configuration(
    what: str, backends: list[Row], settings: list[str]
) -> tuple[str, dict[str, Any]]:
    """Return the backend's name, and the configuration with its method."""
    backend, method = _backend_of(what, backends)
    return backend, {**({"method": method} if method else {}), **set_values(settings)}


def _backend_of(what: str, backends: list[Row]) -> tuple[str, str]:
    """Return the backend and the method of an argument such as `trl-sft`. The gateway refuses an
    unknown backend, with the reason."""
    names = [each["name"] for each in backends if each["kind"] == "job"]
    found = max((name for name in names if what.startswith(f"{name}-")), key=len, default="")
    if not found or what in names:
        return what, ""
    return found, what.removeprefix(f"{found}-")


def _say_job(about: Row) -> None:
    if about["name"]:
        say(printable(about["name"]))
    processes = f"{about['processes']} process{'es' * (about['processes'] > 1)}"
    say(f"{about['id']}: {about['base_model']}, {about['framework']}, {processes}")
    queue = f", number {about['queue_position']} in the queue" if about["queue_position"] else ""
    waited = f" for {duration(about['waited_seconds'])}" if about["waited_seconds"] else ""
    say(f"{about['state']}{waited}{queue}, created {moment(about['created_at'])} (UTC)")
    if about["reason"]:
        say(printable(about["reason"]))
    say(f"attempt {about['attempt']}, {about['restarts']} of {about['max_restarts']} restarts used")
    if progress := about["progress"]:
        say(f"step {progress['step']} of {progress['total_steps']} ({done(about)})")
    for rank in about["world"]:
        told = (f"{name} {value}" for name, value in rank.items() if name != "rank")
        say(printable(f"rank {rank.get('rank')}: {', '.join(told)}"))
    for setting, value in about["configuration"].items():
        if value is not None:
            say(printable(f"  {setting} = {value}"))
    if about["result"] is not None:
        _say_result(about)


def _say_result(about: Row) -> None:
    say(f"To sample: {about['result']['sampler_weights']}")
    say(f"To train on: {about['result']['weights']}")
