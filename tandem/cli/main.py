"""The entry of the command line: registers the commands, prints an error as one sentence."""

from __future__ import annotations

import sys

from pydantic import ValidationError
from pydantic_settings import SettingsError

from tandem.cli import (
    backup,
    checkpoints,
    demo,
    doctor,
    groups,
    keys,
    logs,
    models,
    observe,
    runs,
    scale,
    tls,
    up,
    usage,
)
from tandem.cli.context import fail, new_commands
from tandem.errors import TandemError, UnknownSetting, describe
from tandem.settings.gateway import settings_fault

app = new_commands("Reinforcement learning of language models on your own machines.")
app.command("up")(up.up)
app.command("agent")(up.agent)
app.command("demo")(demo.demo)
app.command("status")(observe.status)
app.command("top")(groups.top)
app.command("usage")(usage.usage)
app.command("scale")(scale.scale)
app.command("logs")(logs.logs)
app.command("backup")(backup.backup)
app.command("restore")(backup.restore)
app.command("doctor")(doctor.doctor)
app.command("config")(observe.config)
app.command("version")(observe.version)
app.add_typer(groups.app, name="groups")
app.add_typer(keys.app, name="keys")
app.add_typer(models.app, name="models")
app.add_typer(runs.app, name="runs")
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(tls.app, name="tls")


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
    except OSError as error:  # such as a file that cannot be written
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        sys.exit(1)
