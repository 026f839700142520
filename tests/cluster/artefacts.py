"""What a cluster test leaves for its reader: events, descriptions and logs of a namespace."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cluster.kubectl import Kubectl

_KINDS = "pods,services,persistentvolumeclaims,deployments,statefulsets,networkpolicies"
_SECONDS = 30.0


def keep(kubectl: Kubectl, folder: Path) -> None:
    """Write the state of a namespace into a folder, without Secrets. It never raises."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "events.txt", kubectl, "get", "events", "--sort-by", ".lastTimestamp")
    _write(folder / "objects.yaml", kubectl, "get", _KINDS, "--output", "yaml")
    _write(folder / "claims.yaml", kubectl, "get", "resourceclaims", "--output", "yaml")
    _write(folder / "pods.txt", kubectl, "describe", "pods")
    for name in _pods(kubectl):
        about = ("logs", name, "--all-containers", "--prefix", "--timestamps")
        pod = name.rpartition("/")[2]
        _write(folder / f"{pod}.log", kubectl, *about)
        _write(folder / f"{pod}.previous.log", kubectl, *about, "--previous")


def _pods(kubectl: Kubectl) -> list[str]:
    try:
        return kubectl.names("pods")
    except (AssertionError, subprocess.TimeoutExpired):
        return []


def _write(file: Path, kubectl: Kubectl, *arguments: str) -> None:
    try:
        done = kubectl.run(*arguments, seconds=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        file.write_text(f"{error}\n")
        return
    if done.returncode == 0 and done.stdout:
        file.write_bytes(done.stdout)
    elif not file.name.endswith(".previous.log"):  # most containers have started once
        file.write_bytes(done.stdout + done.stderr)
