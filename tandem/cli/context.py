"""Shared parts of the commands: consoles, JSON output, and the gateway that a command asks.

`chosen_gateway` decides. A URL, of `--url` or TINKER_BASE_URL, names a gateway anywhere, and the
command acts as TINKER_API_KEY. `--data-dir` names this machine's gateway and beats the variable.
Without both, the command asks the gateway of the settings' data directory, as TINKER_API_KEY or as
its local administrator."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
import orjson
import typer
from rich.console import Console
from rich.markup import escape

from tandem.errors import (
    PermissionDenied,
    ServerError,
    TandemError,
    Unauthenticated,
    UserError,
    describe,
    from_type,
)
from tandem.protocol.own_machine import http_client, is_own_machine
from tandem.settings.gateway import GatewaySettings
from tandem.settings.variables import check_environment
from tandem.stack import Endpoint, read_endpoint


def new_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that prints text unchanged. By default, `:train:` in a run's id becomes an
    emoji."""
    return Console(stderr=stderr, width=width, highlight=False, emoji=False)


def new_commands(about: str) -> Commands:
    """Return a group of commands with help texts without rich's markup."""
    return Commands(
        help=about,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


out = new_console()
err = new_console(stderr=True)

Function = TypeVar("Function", bound=Callable[..., None])
Found = TypeVar("Found")
Row = dict[str, Any]

OWN_API = "api/tandem/v1"
TINKER_API = "api/v1"
_PAGE = 1000
URL_VARIABLE, KEY_VARIABLE = "TINKER_BASE_URL", "TINKER_API_KEY"

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="A gateway, also elsewhere (TINKER_BASE_URL). It gets TINKER_API_KEY.",
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Where Tandem keeps its state (TANDEM_DATA_DIR)."),
]


ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A settings file in TOML.")
]


def shown(text: str) -> str:
    """Replace characters that move the cursor or change the terminal. Lines and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def fail(sentence: str, what: str = "error") -> None:
    err.print(f"[red]{what}:[/] {escape(shown(sentence))}", soft_wrap=True)


def say(sentence: str) -> None:
    out.print(shown(sentence), soft_wrap=True, markup=False)


def say_aside(sentence: str) -> None:
    err.print(shown(sentence), soft_wrap=True, markup=False)


def set_values(given: list[str]) -> dict[str, Any]:
    """Return the values of `--set NAME=VALUE`. A value that is no JSON is text."""
    settings: dict[str, Any] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise UserError(f"--set {each!r} is not NAME=VALUE, such as learning_rate=1e-4")
        try:
            settings[name] = orjson.loads(value)
        except orjson.JSONDecodeError:
            settings[name] = value
    return settings


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


_given_url: ContextVar[str] = ContextVar("given_url", default="")
"""The `--url` of this command line."""


def note_url(url: str | None, *, anew: bool = False) -> None:
    """Remember a `--url`. `anew`: a new command line begins."""
    if url is not None or anew:
        _given_url.set(url or "")


class Commands(typer.Typer):
    """Its commands have the option `--url`, except those with `here=True`."""

    def command(  # type: ignore[override]  # typer's other parameters are unused
        self, name: str | None = None, *, here: bool = False
    ) -> Callable[[Function], Function]:
        register = super().command(name)

        def add(function: Function) -> Function:
            register(function if here else _with_url(function))
            return function

        return add


def _with_url(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function of a command with a further parameter `url`."""

    @wraps(function)
    def command(*, url: str | None = None, **values: Any) -> None:
        note_url(url)
        function(**values)

    url = Parameter("url", Parameter.KEYWORD_ONLY, default=None, annotation=UrlOption)
    plain = signature(function, eval_str=True)
    parameters = [*plain.parameters.values(), url]
    vars(command)["__signature__"] = plain.replace(parameters=parameters)
    command.__annotations__ = function.__annotations__ | {"url": UrlOption}
    return command


@dataclass(frozen=True)
class ChosenGateway:
    """A gateway, and the key that a command sends it. `remote`: a URL named it, so this machine's
    files may not be its files."""

    url: str
    api_key: str = field(repr=False)
    remote: bool = False

    def client(self, *, timeout: float = 30) -> httpx.Client:
        headers = {"X-API-Key": self.api_key}
        return http_client(f"{self.url}/", headers=headers, timeout=timeout)


def remote_url(data_dir: Path | None) -> str:
    """Return the URL of `--url` or TINKER_BASE_URL, "" for this machine's gateway. Raises
    `UserError` for a malformed URL, or for both `--url` and `--data-dir`."""
    given, name = _given_url.get(), "--url"
    if given and data_dir is not None:
        raise UserError("--url and --data-dir both name a gateway; give one of them")
    if not given and data_dir is None:
        given, name = os.environ.get(URL_VARIABLE, ""), URL_VARIABLE
    if not given:
        return ""
    try:
        url = httpx.URL(given)
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.userinfo:
        raise UserError(f"{name} contains a name or password; give the key as {KEY_VARIABLE}")
    if url.scheme not in ("http", "https") or not url.host:
        raise UserError(f"{name} is {given[:200]!r}, not a URL such as https://tandem.example.org")
    return given.rstrip("/")


def distant_url(data_dir: Path | None) -> str:
    """Return the URL of a gateway on another machine, "" for one on this machine."""
    url = remote_url(data_dir)
    return "" if not url or is_own_machine(url) else url


def chosen_gateway(data_dir: Path | None) -> ChosenGateway:
    """Return the command's gateway. Raises `UserError` for a remote one without a key, or
    `ServerError` if no gateway runs here."""
    key = os.environ.get(KEY_VARIABLE, "")
    if url := remote_url(data_dir):
        if not key:
            raise UserError(
                f"commands to {url} act as {KEY_VARIABLE}, which is not set; an admin makes a key "
                "with `tandem keys create`"
            )
        return ChosenGateway(url, key, remote=True)
    endpoint = running_gateway(data_dir)
    if data_dir is not None and os.environ.get(URL_VARIABLE):
        key = ""  # it is of the other gateway
    return ChosenGateway(endpoint.url, key or endpoint.api_key)


def resolve_data_dir(data_dir: Path | None) -> Path:
    """Return the data directory of the option, else of the settings, for a command on this
    machine's files. Raises `UserError` with `--url`, or `UnknownSetting`."""
    if _given_url.get():
        raise UserError("this command works on the machine of the gateway only; drop --url")
    check_environment(os.environ)
    return data_dir if data_dir is not None else GatewaySettings().data_dir


def running_gateway(data_dir: Path | None) -> Endpoint:
    """Return the running gateway's endpoint. Raises `ServerError` if none runs."""
    directory = resolve_data_dir(data_dir)
    endpoint = read_endpoint(directory)
    if endpoint is None:
        raise ServerError(
            f"no gateway of this host or container runs on {directory}; start one with "
            f"`tandem up`, name its --data-dir, or name one elsewhere with --url ({URL_VARIABLE})"
        )
    return endpoint


def call(
    data_dir: Path | None,
    method: str,
    path: str,
    *,
    body: Mapping[str, object] | None = None,
    api: str = OWN_API,
    timeout: float = 30,
) -> Any:
    """Call the chosen gateway and return its JSON answer. Raises the gateway's error, or
    `ServerError` if it cannot be reached.

    `timeout` is in seconds. `api` is Tandem's own API or the SDK's."""
    target = chosen_gateway(data_dir)
    with explained(target), target.client(timeout=timeout) as client:
        return read_answer(target, client.request(method, f"{api}/{path}", json=body))


def read_pages(
    ask: Callable[[int, int], tuple[list[Row], int]], *, most: int | None
) -> tuple[list[Row], int]:
    """Return the first rows of a list, `None` for all of them, and how many there are.

    `ask` takes a limit and an offset. It returns a page and the number of all rows."""
    rows: list[Row] = []
    while True:
        page, total = ask(_PAGE if most is None else min(_PAGE, most - len(rows)), len(rows))
        rows += page
        if not page or len(rows) >= min(total, most or total):
            return rows, total


def watch(look: Callable[[], Found], *, pause: float) -> Iterator[Found]:
    """Yield what `look` finds, again and again. A restart of the gateway is waited for."""
    silent = False
    while True:
        try:
            found = look()
        except ServerError as error:
            if not silent:
                say_aside(f"{error.message} (waiting)")
            silent = True
        else:
            silent = False
            yield found
        time.sleep(pause)


@contextmanager
def explained(target: ChosenGateway) -> Iterator[None]:
    """Raise `ServerError`, which says what to do, for a gateway that cannot be reached."""
    try:
        yield
    except httpx.HTTPError as error:
        if (fault := _tls_fault(error)) is not None:
            raise ServerError(f"no TLS connection to {target.url}: {fault}") from error
        if not target.remote:
            hint = "`tandem logs gateway` may show why"
        elif is_own_machine(target.url):
            hint = "start it, or read its files: `tandem logs gateway --data-dir DIRECTORY`"
        else:
            hint = f"check the URL (--url, {URL_VARIABLE}), and that the gateway runs there"
        raise ServerError(
            f"the gateway at {target.url} does not answer: {describe(error)}; {hint}"
        ) from error


def _tls_fault(error: BaseException) -> str | None:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted ({cause.verify_message}); name its authority's file "
            "in SSL_CERT_FILE"
        )
    if cause is not None and "WRONG_VERSION_NUMBER" in str(cause):
        return "the server speaks plain HTTP; begin the URL with http://"
    return None if cause is None else describe(cause)


def read_answer(target: ChosenGateway, answer: httpx.Response) -> Any:
    """Return a JSON answer, None if it is empty. Raises the gateway's error, or `ServerError` if
    the server is no Tandem gateway."""
    if answer.is_success and not answer.content:
        return None
    try:
        content: Any = answer.json()
    except ValueError:
        content = None
    if answer.is_success and content is not None:
        return content
    error = _refusal(content)
    if error is None:
        moved = answer.headers.get("location", "")
        hint = f"it redirects to {moved}" if answer.is_redirect else f"status {answer.status_code}"
        raise ServerError(
            f"the server at {target.url} is not a Tandem gateway ({hint}); check the URL (--url, "
            f"{URL_VARIABLE})"
        )
    if isinstance(error, Unauthenticated) and os.environ.get(KEY_VARIABLE) == target.api_key:
        or_none = "" if target.remote else ", or unset it to act as the local administrator"
        raise Unauthenticated(
            f"{target.url} refuses {KEY_VARIABLE}: {error.message.partition(';')[0]}; set it to a "
            f"key of this gateway, which an admin makes with `tandem keys create`{or_none}"
        )
    if isinstance(error, PermissionDenied):
        raise PermissionDenied(f"{target.url} does not permit this: {error.message}")
    raise error


def _refusal(content: object) -> TandemError | None:
    """Return the error of a refusal in Tandem's form or in OpenAI's."""
    if not isinstance(content, dict):
        return None
    said: Any = content.get("error")
    type_: Any = content.get("type")
    if isinstance(said, dict):
        said, type_ = said.get("message"), said.get("code")
        if type_ == "invalid_api_key":
            type_ = Unauthenticated.type
    if not isinstance(said, str) or not isinstance(type_, str):
        return None
    return from_type(type_, said)


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
