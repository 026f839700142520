"""`tandem checkpoints`: list, delete, export and serve the checkpoints of training runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import quote

import httpx
import typer

from tandem.cli.context import (
    TINKER_API,
    DataDir,
    JsonFlag,
    Row,
    call,
    end_if_json,
    new_commands,
    read_pages,
    say,
    say_aside,
)
from tandem.cli.run_names import run_in_url
from tandem.cli.tables import Column, moment, say_rest, show_table
from tandem.errors import InvalidRequest, NameTaken, ServerError, UserError, describe
from tandem.protocol.own_machine import http_client
from tandem.weights.model_files import ties_head
from tandem.weights.model_store import read_record
from tandem.weights.serving import (
    Precision,
    ServedCheckpoint,
    hub_address,
    inference_service,
    inference_service_yaml,
    vllm_commands,
    vllm_script,
)

app = new_commands("Checkpoints: list, delete, export and serve.")

_PREFIX = "tinker://"
_BLOCK_BYTES = 2**20
_MERGE_TIMEOUT = 3600
_HEAD_NOTE = (
    "Note: this adapter changes the output head. If vLLM cannot load it, use --merged, or train "
    "with train_unembed=False."
)
_PATH = typer.Argument(help="Such as tinker://RUN/sampler_weights/NAME.")


@app.command("list")
def list_checkpoints(
    run: Annotated[
        str | None, typer.Option("--run", help="Only those of this training run.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most this many.")] = 50,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """List checkpoints, newest first.

    Example: tandem checkpoints list --run my-run"""
    most = None if every else limit
    if run is None:
        rows, total = _newest(data_dir, most)
    else:
        of_run = _of_run(data_dir, run)[::-1]
        rows, total = of_run[:most], len(of_run)
    end_if_json(as_json, {"checkpoints": rows})
    show_table(
        [
            Column("path"),
            Column("bytes", right=True),
            Column("expires", wrap=10),
            Column("public"),
            Column("created", wrap=10),
        ],
        [
            (
                row["tinker_path"],
                row["size_bytes"],
                moment(row["expires_at"]),
                "yes" if row["public"] else "",
                moment(row["time"]),
            )
            for row in rows
        ],
        empty="No checkpoints.",
    )
    say_rest(len(rows), total, "checkpoints")


@app.command("delete")
def delete(
    paths: Annotated[list[str], _PATH],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Delete checkpoints.

    Their files are removed once nothing uses them.

    Example: tandem checkpoints delete tinker://RUN/weights/warm-up"""
    for path in paths:
        _split(path)
    if not yes and not typer.confirm(f"Delete {', '.join(paths)}?", err=True):
        raise typer.Abort
    for path in paths:
        run_id, kind, name = _split(path)
        where = f"training_runs/{run_id}/checkpoints/{kind}/{name}"
        call(data_dir, "DELETE", where, api=TINKER_API)
        if not as_json:
            say(f"{path} is deleted.")
    end_if_json(as_json, {"deleted": paths})


@app.command("export")
def export(
    path: Annotated[str, _PATH],
    directory: Annotated[Path, typer.Argument(help="A directory that does not exist yet.")],
    merged: Annotated[
        bool,
        typer.Option("--merged", help="Merge a LoRA adapter into its base model."),
    ] = False,
    base: Annotated[
        Path | None,
        typer.Option("--base", help="The adapter's base model. Default: the registered one."),
    ] = None,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Copy a checkpoint's files into a new directory.

    Load the result of save_weights_for_sampler or save_weights_external with transformers, or with
    PEFT for a LoRA run. The result of save_state is a trainer's state, for backups.

    Example: tandem checkpoints export tinker://RUN/sampler_weights/final ./final"""
    _split(path)
    if directory.exists():
        raise NameTaken(f"{directory} exists already; name a directory that does not")
    urls = call(data_dir, "GET", f"checkpoints/files?path={quote(path, safe=':/')}")["urls"]
    if merged and "adapter_config.json" not in urls:
        raise InvalidRequest(f"{path} holds no LoRA adapter to merge; export it without --merged")
    if odd := [name for name in urls if name != Path(name).name or name == ".."]:
        raise ServerError(f"the gateway names a file {odd[0]!r}, which is no plain name")
    partial, note = directory.with_name(f".{directory.name}.partial"), ""
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        size = sum(_download(url, partial / name) for name, url in sorted(urls.items()))
        if "adapter_config.json" in urls:
            name = _loading_facts(data_dir, path)["base_model"]
            base = base or _registered_base(data_dir, name, needed=merged)
        if merged and base:
            if not base.is_dir():
                raise InvalidRequest(
                    f"the base model {base} is not on this machine; name its folder with --base"
                )
            _merge(adapter=partial, base=base, target=directory)
            shutil.rmtree(partial)
        else:
            if base and base.is_dir():
                note = _name_base(partial / "adapter_config.json", base.resolve())
            partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    end_if_json(
        as_json, {"path": path, "directory": str(directory), "bytes": size, "merged": merged}
    )
    say(f"{path} is in {directory}{' (merged)' if merged else ''}.")
    if note:
        say(f"Note: {note}.")


@app.command("serve")
def serve(
    path: Annotated[str, _PATH],
    server: Annotated[
        Literal["vllm", "kserve"],
        typer.Option("--as", help="Commands for `vllm serve`, or KServe's InferenceService."),
    ] = "vllm",
    storage: Annotated[
        str,
        typer.Option("--storage", metavar="URI", help="KServe: where you put the exported files."),
    ] = "",
    base: Annotated[
        str,
        typer.Option(
            "--base",
            help="An adapter's base model: hf://ORG/NAME:REVISION, a folder (vLLM), or another URI "
            "(KServe). Default: the registered one.",
        ),
    ] = "",
    merged: Annotated[
        bool, typer.Option("--merged", help="Merge a LoRA adapter into its base model.")
    ] = False,
    name: Annotated[
        str, typer.Option("--name", help="The clients' name. Default: the checkpoint's.")
    ] = "",
    dtype: Annotated[Precision, typer.Option("--dtype", help="Of the weights.")] = "bfloat16",
    gpus: Annotated[int, typer.Option("--gpus", min=0, help="KServe: how many.")] = 1,
    data_dir: DataDir = None,
    as_json: JsonFlag = False,
) -> None:
    """Print how to serve a checkpoint without Tandem. This starts nothing.

    Example: tandem checkpoints serve tinker://RUN/sampler_weights/final --as vllm"""
    _split(path)
    facts = _loading_facts(data_dir, path)
    rank = facts.get("lora_rank") if facts["is_lora"] else None
    if rank is not None and not merged:
        base = base or _origin(_registered_base(data_dir, facts["base_model"], needed=True))
        if facts.get("train_unembed"):
            say_aside(_HEAD_NOTE)
    served = ServedCheckpoint(
        path=path, rank=rank, base=base, merged=merged, name=name, dtype=dtype
    )
    if server == "vllm":
        end_if_json(as_json, {"commands": vllm_commands(served)})
        print(vllm_script(served), end="")
        return
    end_if_json(as_json, inference_service(served, storage=storage, gpus=gpus))
    print(inference_service_yaml(served, storage=storage, gpus=gpus), end="")


def _origin(folder: Path | None) -> str:
    """Return a base model's address at its hub, or the folder."""
    record = read_record(folder) if folder else None
    return hub_address(record) if record else str(folder or "")


def _newest(data_dir: Path | None, most: int | None) -> tuple[list[Row], int]:
    def ask(limit: int, offset: int) -> tuple[list[Row], int]:
        where = f"checkpoints?limit={limit}&offset={offset}"
        answer = call(data_dir, "GET", where, api=TINKER_API)
        return answer["checkpoints"], answer["cursor"]["total_count"]

    return read_pages(ask, most=most)


def _of_run(data_dir: Path | None, run: str) -> list[Row]:
    where = f"training_runs/{run_in_url(data_dir, run)}/checkpoints"
    rows: list[Row] = call(data_dir, "GET", where, api=TINKER_API)["checkpoints"]
    return rows


def _split(path: str) -> tuple[str, str, str]:
    parts = path.removeprefix(_PREFIX).split("/")
    if not path.startswith(_PREFIX) or len(parts) != 3 or not all(parts):
        raise InvalidRequest(f"{path!r} is not a checkpoint's path, such as tinker://RUN/KIND/NAME")
    run_id, kind, name = (quote(part, safe=":") for part in parts)
    return run_id, kind, name


def _download(url: str, target: Path) -> int:
    """Returns the bytes. Raises `UserError` or `ServerError`."""
    size = 0
    try:
        with (
            http_client(url) as client,
            client.stream("GET", url) as answer,
            target.open("xb") as file,
        ):
            if answer.is_error:
                answer.read()
                raise UserError(str(answer.json().get("error", answer.text)))
            for block in answer.iter_bytes(_BLOCK_BYTES):
                size += file.write(block)
    except httpx.HTTPError as error:
        raise ServerError(f"the download of {target.name} broke off: {describe(error)}") from error
    return size


def _loading_facts(data_dir: Path | None, path: str) -> Row:
    """Return the base model's name, `base_model`, and the facts of an adapter."""
    facts: Row = call(data_dir, "POST", "weights_info", body={"tinker_path": path}, api=TINKER_API)
    return facts


def _registered_base(data_dir: Path | None, name: str, *, needed: bool) -> Path | None:
    """Return the folder of a base model. None if it is unknown and not `needed`."""
    for model in call(data_dir, "GET", "models")["models"]:
        if model["name"] == name and model["path"]:
            return Path(model["path"])
    if not needed:
        return None
    raise InvalidRequest(f"the base model {name!r} is not registered; name its folder with --base")


def _name_base(config: Path, base: Path) -> str:
    """Write the base model's local folder into an exported adapter, for PEFT.

    Returns a note about merging, or ""."""
    content = json.loads(config.read_text())
    content |= {"base_model_name_or_path": str(base), "revision": None}
    config.write_text(json.dumps(content, indent=1))
    head = any(name.rpartition(".")[2] == "lm_head" for name in content.get("target_modules", ()))
    if not head or not ties_head(base):
        return ""
    return (
        "the base model's output head shares its weight with the embeddings, so PEFT's "
        "merge_and_unload and tinker-cookbook cannot merge this adapter; export it with --merged"
    )


def _merge(*, adapter: Path, base: Path, target: Path) -> None:
    """Merge in another process, because that needs torch. Raises `ServerError`."""
    command = [sys.executable, "-m", "trainer_service.lora.merge", adapter, base, target]
    try:
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            check=False,
            timeout=_MERGE_TIMEOUT,
        )
    except subprocess.TimeoutExpired as error:
        shutil.rmtree(target, ignore_errors=True)
        raise ServerError(f"merging took longer than {_MERGE_TIMEOUT} s") from error
    if done.returncode != 0:
        shutil.rmtree(target, ignore_errors=True)
        last = done.stderr.strip().rpartition("\n")[2]
        raise ServerError(f"the adapter could not be merged into {base}: {last}")
