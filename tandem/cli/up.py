"""`tandem up` runs a gateway and its agent until Ctrl-C. `tandem agent` runs only an agent."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

import httpx
import typer

from tandem.agent.environment import inherited
from tandem.agent.host import this_host
from tandem.blueprints.runner import BlueprintRunner
from tandem.cli.context import (
    ConfigFile,
    DataDir,
    JsonFlag,
    fail,
    print_json,
    resolve_data_dir,
    say,
    say_aside,
)
from tandem.errors import describe
from tandem.protocol.http_host import is_loopback
from tandem.protocol.own_machine import follows_proxy
from tandem.protocol.sign_in_code import make_code
from tandem.settings.config_file import apply_config_file, why_exposed
from tandem.settings.gateway import GatewaySettings
from tandem.stack import Stack
from tandem.stack.host_summary import describe_found


def up(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; else TANDEM_HOST, or 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Port to listen on, 0: any free one; else TANDEM_PORT, or 8000."),
    ] = None,
    data_dir: DataDir = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="NAME=PATH", help="A base model; may be repeated."),
    ] = None,
    config: ConfigFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Start the gateway and its agent.

    Prints a URL and a key. Ctrl-C saves the runs and stops everything. A second Ctrl-C stops at
    once.

    Options win over the environment, and that over a settings file.

    Example: tandem up --port 8000 --model tiny=./models/tiny"""
    models = [parse_model(text) for text in model or []]
    warn = partial(fail, what="warning")
    if config is not None:
        apply_config_file(config, os.environ)
        if sentence := why_exposed(config):
            warn(sentence)
    directory = resolve_data_dir(data_dir)
    signal.signal(signal.SIGTERM, interrupt)
    settings: dict[str, str] = {}
    if host is not None:
        settings["host"] = host
    if port is not None:
        settings["port"] = str(port)
    if models:
        settings["models"] = json.dumps({name: str(path.resolve()) for name, path in models})
    with Stack(data_dir=directory, settings=settings, tell=warn, say=say_aside) as stack:
        stop_runner = threading.Event()
        try:
            _announce(stack, warn, as_json=as_json)
            stop_runner = _start_runner(stack)
            stack.wait()
        except KeyboardInterrupt:
            if not as_json:
                say("\nStopping …")
        finally:
            stop_runner.set()


def agent(
    data_dir: DataDir = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="For a gateway of another host; needs --tls.")
    ] = "",
    advertise: Annotated[
        str, typer.Option(metavar="NAME", help="Where others reach this host; its name by default.")
    ] = "",
    tls: Annotated[
        Path | None, typer.Option(help="A folder with its certificate, of `tandem tls issue`.")
    ] = None,
    logs: Annotated[
        Path | None,
        typer.Option(help="For the logs of workers: that of the gateway's data directory."),
    ] = None,
) -> None:
    """Start an agent, which runs workers on this machine.

    Without --listen, it serves a gateway of this data directory that was not started by `tandem
    up`. With --listen, it serves the gateway of another host, which must name it in TANDEM_AGENTS.
    Ctrl-C stops the agent and its workers.

    Example: tandem agent --listen 0.0.0.0:7000 --tls ./agent-tls"""
    command = [sys.executable, "-m", "tandem.agent", "--data-dir", str(resolve_data_dir(data_dir))]
    if listen and tls is None:
        raise typer.BadParameter("--listen needs --tls: an agent starts programs")
    if not listen and (advertise or tls or logs):
        raise typer.BadParameter("--advertise, --tls and --logs are for --listen")
    if listen:
        command += ["--listen", listen, "--advertise", advertise, "--tls", str(tls)]
        command += ["--logs", str(logs)] if logs is not None else []
    os.execve(sys.executable, command, inherited(os.environ))


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Handle SIGTERM like Ctrl-C."""
    raise KeyboardInterrupt


def _start_runner(stack: Stack) -> threading.Event:
    """Train the trials of the playground, if the gateway has one. Return the event that stops
    it."""
    slots, stop = GatewaySettings().playground.runs, threading.Event()
    endpoint = stack.endpoint

    def run() -> None:
        try:
            BlueprintRunner(
                url=endpoint.url, key=endpoint.api_key, slots=slots, say=say_aside
            ).run_trials(stop)
        except Exception as error:  # noqa: BLE001 - visitors see that no runner asks
            fail(f"the playground has no runner any more: {describe(error, typed=True)}")

    if slots:
        threading.Thread(target=run, name="runner", daemon=True).start()
    return stop


def _announce(stack: Stack, warn: Callable[[str], None], *, as_json: bool) -> None:
    endpoint = stack.endpoint
    with stack.client() as client:
        for sentence in client.get("status").raise_for_status().json()["warnings"]:
            warn(sentence)
    if as_json:
        print_json({"url": endpoint.url, "api_key": endpoint.api_key, "pid": endpoint.pid})
        return
    lines = [f"Tandem is up at {endpoint.url}; log: {stack.log_path}"]
    if (settings := GatewaySettings()).launcher == "agent" and not settings.agents:
        lines.append(describe_found(settings, this_host(), ranks=settings.trainer.ranks))
    if is_loopback(httpx.URL(endpoint.url).host):
        code = make_code(endpoint.api_key, now=time.time())
        lines.append(
            f"\nOpen the page (the link signs in once): {endpoint.url}/sign-in#code={code}"
        )
    lines += [
        "\nPoint the tinker SDK at it:\n",
        f"  export TINKER_BASE_URL={endpoint.url}",
        f"  export TINKER_API_KEY={endpoint.api_key}",
    ]
    if follows_proxy(endpoint.url):  # the SDK would use the proxy
        host = httpx.URL(endpoint.url).host
        lines.append(f"  export NO_PROXY={host} no_proxy={host}")
    lines += [
        "\nThis is the local admin key, which should stay on this machine; create keys for "
        "others with `tandem keys create --owner NAME`.",
        "`tandem status` shows what runs. Ctrl-C saves the runs and stops everything.",
    ]
    say("\n".join(lines))


def parse_model(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals or not name or not path:
        raise typer.BadParameter(f"{text!r} is not NAME=PATH")
    if not Path(path).is_dir():
        raise typer.BadParameter(f"{path} is not a directory")
    return name, Path(path)
