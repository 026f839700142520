"""Shared parts of the commands: consoles, JSON output and calls to the gateway."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import orjson
import typer
from rich.console import Console
from rich.markup import escape

from tandem.errors import ServerError, UserError, describe
from tandem.protocol.own_machine import http_client
from tandem.settings.gateway import GatewaySettings
from tandem.settings.variables import check_environment
from tandem.stack import Endpoint, read_endpoint


def new_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that prints text unchanged. By default, `:train:` in a run's id becomes an
    emoji."""
    return Console(stderr=stderr, width=width, highlight=False, emoji=False)


def new_commands(about: str) -> typer.Typer:
    """Return a group of commands with help texts without rich's markup."""
    return typer.Typer(
        help=about,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


out = new_console()
err = new_console(stderr=True)

OWN_API = "api/tandem/v1"
TINKER_API = "api/v1"

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Where Tandem keeps its state (TANDEM_DATA_DIR)."),
]


def fail(sentence: str, what: str = "error") -> None:
    err.print(f"[red]{what}:[/] {escape(sentence)}", soft_wrap=True)


def say(sentence: str) -> None:
    out.print(sentence, soft_wrap=True, markup=False)


def say_aside(sentence: str) -> None:
    err.print(sentence, soft_wrap=True, markup=False)


def print_json(value: object) -> None:
    print(orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode())


def end_if_json(as_json: bool, answer: object) -> None:
    """With `--json`, print the answer and end the command."""
    if as_json:
        print_json(answer)
        raise typer.Exit


def read_settings() -> GatewaySettings:
    """Return the settings of the environment. Raises `UnknownSetting`."""
    check_environment(os.environ)
    return GatewaySettings()


def resolve_data_dir(data_dir: Path | None) -> Path:
    """Return the data directory of the option, else of the settings. Raises `UnknownSetting`."""
    check_environment(os.environ)
    return data_dir if data_dir is not None else GatewaySettings().data_dir


def running_gateway(data_dir: Path | None) -> Endpoint:
    """Return the running gateway's endpoint. Raises `ServerError` if none runs."""
    directory = resolve_data_dir(data_dir)
    endpoint = read_endpoint(directory)
    if endpoint is None:
        raise ServerError(
            f"no gateway of this host or container runs on {directory}; start one with "
            "`tandem up`, or name its --data-dir"
        )
    return endpoint


def id_in_url(given: str) -> str:
    """Return the id of a run or session for a URL. Raises `UserError` for a path."""
    if "/" in given:
        raise UserError(
            f"{given!r} is not an id, such as s-0123456789ab:train:0; `tandem status` and "
            "`tandem runs list` show ids"
        )
    return quote(given, safe=":")


def call(
    data_dir: Path | None,
    method: str,
    path: str,
    *,
    body: Mapping[str, object] | None = None,
    api: str = OWN_API,
    timeout: float = 30,
) -> Any:
    """Call the gateway and return its JSON answer. Raises `ServerError` for an error.

    `timeout` is in seconds. `api` is Tandem's own API or the SDK's."""
    endpoint = running_gateway(data_dir)
    try:
        with http_client(
            f"{endpoint.url}/{api}/", headers={"X-API-Key": endpoint.api_key}, timeout=timeout
        ) as client:
            answer = client.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise ServerError(
            f"the gateway at {endpoint.url} does not answer: {describe(error)}; `tandem "
            "logs gateway` may show why"
        ) from error
    if answer.is_error:
        raise ServerError(answer.json().get("error", answer.text))
    return answer.json() if answer.content else None


def run_offline(
    module: str,
    data_dir: Path,
    request: Mapping[str, object],
    *,
    asked: str = "the database",
    timeout: float = 60,
) -> dict[str, Any]:
    """Send a JSON request to a module of the gateway and return its answer.

    The module runs in another process: the command line must not import the gateway. Raises the
    module's error. `asked` names the subject in the error for a missing answer."""
    read_settings()  # the module reads them too, and could not explain an invalid one
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=orjson.dumps(request),
            capture_output=True,
            env={**os.environ, "TANDEM_DATA_DIR": str(data_dir)},
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ServerError(f"{asked} did not answer within {timeout:g} s") from error
    try:
        answer: dict[str, Any] = orjson.loads(done.stdout)
    except orjson.JSONDecodeError as error:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ServerError(f"{asked} could not be reached: {''.join(last)}") from error
    if "error" in answer:
        raise UserError(str(answer["error"]))
    return answer
