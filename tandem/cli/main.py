"""The entry of the command line: registers the commands, prints an error as one sentence."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from pydantic import ValidationError
from pydantic_settings import SettingsError

from tandem import __version__
from tandem.cli import (
    backends,
    backup,
    blueprint,
    chat,
    checkpoints,
    ci,
    config,
    demo,
    doctor,
    groups,
    keys,
    logs,
    models,
    observe,
    owners,
    playground,
    report,
    runs,
    scale,
    sessions,
    tls,
    train,
    up,
    usage,
    view,
)
from tandem.cli.context import UrlOption, fail, new_commands, note_url, say
from tandem.errors import TandemError, UnknownSetting, describe
from tandem.settings.gateway import settings_fault

app = new_commands("Reinforcement learning of language models on your own machines.")
app.command("up", here=True)(up.up)
app.command("agent", here=True)(up.agent)
app.command("demo", here=True)(demo.demo)
app.command("chat")(chat.chat)
app.command("status")(observe.status)
app.command("top")(groups.top)
app.command("train")(train.train)
app.command("jobs")(train.list_jobs)
app.command("backends")(backends.list_backends)
app.command("usage")(usage.usage)
app.command("report")(report.report)
app.command("scale")(scale.scale)
app.command("logs")(logs.logs)
app.command("backup", here=True)(backup.backup)
app.command("restore", here=True)(backup.restore)
app.command("doctor", here=True)(doctor.doctor)
app.command("config")(config.config)
app.command("view", here=True)(view.view)
app.command("version", here=True)(observe.version)
app.command("ping")(observe.ping)
app.add_typer(blueprint.app, name="blueprint")
app.add_typer(ci.app, name="ci")
app.add_typer(groups.app, name="groups")
app.add_typer(keys.app, name="keys")
app.add_typer(models.app, name="models")
app.add_typer(owners.app, name="owners")
app.add_typer(playground.app, name="playground")
app.add_typer(runs.app, name="runs")
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(sessions.app, name="sessions")
app.add_typer(tls.app, name="tls")


def _say_version(asked: bool) -> None:
    if asked:
        say(f"tandem {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Print Tandem's version."
        ),
    ] = False,
    url: UrlOption = None,
) -> None:
    note_url(url, anew=True)


def main() -> None:
    """Run the command line. Exits with status 1 on an error, 2 for an unknown setting."""
    try:
        app()
    except (ValidationError, SettingsError) as error:  # an invalid setting
        fail(settings_fault(error))
        sys.exit(1)
    except (TandemError, ValueError) as error:
        fail(describe(error))
        sys.exit(2 if isinstance(error, UnknownSetting) else 1)
    except BrokenPipeError:  # the reader has read enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # such as a file that cannot be written
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        sys.exit(1)
