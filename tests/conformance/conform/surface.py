"""The installed SDK's public methods of clients, and its commands."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass

import click

NEWEST = "0.38.0"
"""The whole suite's release. The surface below is of this release."""

OLDEST = "0.27.2"
"""The oldest release that we claim to serve, for the suite's core (scripts/conformance.sh)."""

CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient")
COMMAND = "tinker"
"""The first word of every command, as in `tinker run list`."""


@dataclass(frozen=True)
class Method:
    owner: str
    name: str
    deprecated: bool
    """From the SDK's own decorator (PEP 702)."""

    @property
    def path(self) -> str:
        return f"{self.owner}.{self.name}"


def client_class(name: str) -> type | None:
    """A client's class, wherever it is exported. Some releases have no AdminClient."""
    module = f"tinker.lib.public_interfaces.{name.removesuffix('Client').lower()}_client"
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return None


def public_methods() -> list[Method]:
    """Public methods, also static and class methods, without properties and attributes."""
    return [
        Method(
            owner=owner,
            name=name,
            deprecated=hasattr(getattr(member, "__func__", member), "__deprecated__"),
        )
        for owner in CLIENTS
        if (client := client_class(owner)) is not None
        for name, member in vars(client).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, (staticmethod, classmethod)))
    ]


def commands() -> list[str]:
    """The commands of `tinker`, such as `tinker checkpoint set-ttl`."""
    from tinker.cli.__main__ import main_cli

    return _commands(main_cli, COMMAND)


def _commands(command: click.Command, path: str) -> list[str]:
    if not isinstance(command, click.Group):
        return [path]
    context = click.Context(command)
    found = []
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        assert below is not None
        found += _commands(below, f"{path} {name}")
    return found


def surface() -> set[str]:
    """All subjects of claims: `TrainingClient.forward`, `tinker run list`."""
    return {method.path for method in public_methods()} | set(commands())
