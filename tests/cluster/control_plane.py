"""A control plane of this machine, from given binaries, for the time of the cluster tests.

A folder with `etcd` and `kube-apiserver` gives an API server without nodes: pods never run, so only
tests of objects and rights do. A folder with `kind` gives a node, and Docker must run."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.support.ports import known_port

_STOPS_WITHIN = 20.0
_LAST_LINES = 15


class StartFailed(Exception):
    """Names the program and the end of its log."""


@dataclass(frozen=True)
class ControlPlane:
    kubeconfig: Path
    has_nodes: bool


@contextmanager
def started(
    binaries: Path, work: Path, logs: Path, *, images: Sequence[str], deadline: float
) -> Iterator[ControlPlane]:
    """Start what the binaries allow, and stop it after the block. `deadline` is monotonic.

    `images` go into the node. Logs of programs go into `logs`. Raises `StartFailed`."""
    if (kind := binaries / "kind").is_file():
        with _kind(kind, work, logs, images=images, deadline=deadline) as plane:
            yield plane
        return
    missing = [name for name in ("etcd", "kube-apiserver") if not (binaries / name).is_file()]
    if missing:
        raise StartFailed(f"{binaries} has neither kind nor {' and '.join(missing)}")
    with _api_server(binaries, work, logs, deadline=deadline) as plane:
        yield plane


# --- etcd and kube-apiserver ----------------------------------------------------------------------


@contextmanager
def _api_server(
    binaries: Path, work: Path, logs: Path, *, deadline: float
) -> Iterator[ControlPlane]:
    clients, peers, port = known_port(), known_port(), known_port()
    etcd = f"http://127.0.0.1:{clients}"
    private, public, tokens = work / "accounts.key", work / "accounts.pub", work / "tokens.csv"
    _write_keys(private, public)
    token = secrets.token_hex(24)
    tokens.write_text(f"{token},admin,admin,system:masters\n")
    tokens.chmod(0o600)
    url = f"https://127.0.0.1:{port}"
    kubeconfig = work / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(_kubeconfig(url, token)))
    kubeconfig.chmod(0o600)
    storage = (
        str(binaries / "etcd"),
        f"--data-dir={work / 'etcd'}",
        f"--listen-client-urls={etcd}",
        f"--advertise-client-urls={etcd}",
        f"--listen-peer-urls=http://127.0.0.1:{peers}",
        "--unsafe-no-fsync",
    )
    server = (
        str(binaries / "kube-apiserver"),
        f"--etcd-servers={etcd}",
        f"--cert-dir={work / 'certificates'}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        "--allow-privileged=true",
        f"--secure-port={port}",
        f"--token-auth-file={tokens}",
        "--authorization-mode=RBAC",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={public}",
        f"--service-account-signing-key-file={private}",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--disable-admission-plugins=ServiceAccount",  # no controller makes the default account
    )
    with _running(storage, logs / "etcd.log"), _running(server, logs / "kube-apiserver.log") as one:
        _wait(lambda: _is_ready(kubeconfig), one, logs / "kube-apiserver.log", deadline=deadline)
        yield ControlPlane(kubeconfig, has_nodes=False)


def _write_keys(private: Path, public: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = serialization.Encoding.PEM
    private.touch(mode=0o600)
    private.write_bytes(
        key.private_bytes(
            pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )
    public.write_bytes(
        key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def _kubeconfig(url: str, token: str) -> dict[str, object]:
    """The server signs its own certificate, and listens on this machine only."""
    name = "tandem-test"
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
        "users": [{"name": name, "user": {"token": token}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }


def _is_ready(kubeconfig: Path) -> bool:
    asked = ("kubectl", "--kubeconfig", str(kubeconfig), "get", "--raw", "/readyz")
    try:
        return subprocess.run(asked, capture_output=True, timeout=10, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


# --- kind -----------------------------------------------------------------------------------------


@contextmanager
def _kind(
    kind: Path, work: Path, logs: Path, *, images: Sequence[str], deadline: float
) -> Iterator[ControlPlane]:
    name, kubeconfig = f"tandem-test-{secrets.token_hex(3)}", work / "kubeconfig"
    of_cluster = ("--name", name)
    log = logs / "kind.log"
    try:
        create = ("create", "cluster", *of_cluster, "--kubeconfig", str(kubeconfig))
        _run((str(kind), *create, "--wait", "3m"), log, deadline=deadline)
        if images:
            load = (str(kind), "load", "docker-image", *of_cluster, *images)
            _run(load, log, deadline=deadline)
        yield ControlPlane(kubeconfig, has_nodes=True)
    finally:
        for last in (("export", "logs", str(logs / "node")), ("delete", "cluster")):
            soon = time.monotonic() + 60
            _run((str(kind), *last, *of_cluster), log, deadline=soon, must=False)


def _run(command: Sequence[str], log: Path, *, deadline: float, must: bool = True) -> None:
    with _running(command, log) as process:
        try:
            status = process.wait(timeout=max(deadline - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            status = None
    if must and status != 0:
        how = "did not end in time" if status is None else f"ended with status {status}"
        raise StartFailed(f"{' '.join(command)} {how}:\n{_end_of(log)}")


# --- Programs -------------------------------------------------------------------------------------


@contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(timeout=_STOPS_WITHIN)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=_STOPS_WITHIN)


def _wait(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, *, deadline: float
) -> None:
    while not ready():
        if process.poll() is not None:
            raise StartFailed(f"{process.args[0]} ended:\n{_end_of(log)}")
        if time.monotonic() > deadline:
            raise StartFailed(f"{process.args[0]} is not ready in time:\n{_end_of(log)}")
        time.sleep(0.2)


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
