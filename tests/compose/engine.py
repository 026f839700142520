"""Docker, Compose, and the images of this test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PREFIX = "tandem-test/"
BASE = f"{PREFIX}python:bookworm"
PROJECT = "tandem-test"
PORT, PROMETHEUS_PORT, WHEELS_PORT = 18400, 18401, 18402
IMAGES = {
    "tandem-gateway:test": "deploy/gateway.Dockerfile",
    "tandem-client:test": "deploy/client.Dockerfile",
    "tandem-trainer:test-cpu": "deploy/trainer.Dockerfile",
    "tandem-sampler:test-cpu": "deploy/sampler.Dockerfile",
    "postgres:test": "tests/compose/postgres.Dockerfile",
    "prometheus:test": "tests/compose/prometheus.Dockerfile",
}
ENVIRONMENT = {
    **os.environ,
    "COMPOSE_FILE": str(ROOT / "docker-compose.yaml"),
    "COMPOSE_PROJECT_NAME": PROJECT,
    "COMPOSE_PROFILES": "cpu",
    "TANDEM_IMAGES": PREFIX,
    "TANDEM_VERSION": "test",
    "POSTGRES_IMAGE": f"{PREFIX}postgres:test",
    "PROMETHEUS_IMAGE": f"{PREFIX}prometheus:test",
    "TANDEM_PORT": f"127.0.0.1:{PORT}",
    "PROMETHEUS_PORT": f"127.0.0.1:{PROMETHEUS_PORT}",
    "DOCKER_BUILDKIT": "0",
}
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_PACKAGES = "ca-certificates,python3,python3-venv,python3-pip"


def output(*command: str, folder: Path = ROOT, timeout: float = 1800) -> str:
    """Run a command and return its output. Raises `CalledProcessError` after printing it."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        print(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}", flush=True)
    done.check_returncode()
    return done.stdout


def compose(*arguments: str, timeout: float = 600) -> str:
    command = ("docker", "compose") if has_plugin() else ("docker-compose",)
    return output(*command, *arguments, timeout=timeout)


@cache
def has_plugin() -> bool:
    """Whether this machine has Compose as Docker's plugin rather than 1.29."""
    asked = ("docker", "compose", "version")
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def inside(service: str, *command: str) -> str:
    return compose("exec", "-T", service, *command)


def build_images() -> None:
    """Build all images with the classic builder, from cached layers if possible."""
    if not output("docker", "images", "--quiet", BASE):
        _make_base()
    with _wheels() as found:
        for tag, file in IMAGES.items():
            arguments = {"BASE_IMAGE": BASE, "TANDEM_VERSION": "test", "PIP_FIND_LINKS": found}
            chosen = [f"--build-arg={name}={value}" for name, value in arguments.items()]
            context = str(HERE) if file.startswith("tests") else "."
            built = ("docker", "build", "--network=host", *chosen, "-f", file, "-t", PREFIX + tag)
            output(*built, context, timeout=3600)
            print(f"image {tag}: {_megabytes(PREFIX + tag)} MB", flush=True)


def _make_base() -> None:
    """Make the base image of Debian's packages, with this machine's certificate authorities."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        output("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(root))
        shutil.copy(_CERTIFICATES, root / _CERTIFICATES.lstrip("/"))
        trust = f"ENV SSL_CERT_FILE={_CERTIFICATES} PIP_CERT={_CERTIFICATES}"
        archive = str(Path(folder) / "root.tar")
        output("tar", "--directory", str(root), "--create", "--file", archive, ".")
        output("docker", "import", "--change", trust, archive, BASE)


@contextmanager
def _wheels() -> Iterator[str]:
    """Yield the address where a build finds the wheels of PIP_FIND_LINKS, if a local folder.

    The address never changes, so that the builder reuses its layers."""
    found = os.environ.get("PIP_FIND_LINKS", "")
    if not Path(found).is_dir():
        yield found
        return
    handler = partial(_Quiet, directory=found)
    with ThreadingHTTPServer(("127.0.0.1", WHEELS_PORT), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{WHEELS_PORT}/"
        server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


def _megabytes(image: str) -> int:
    (found,) = json.loads(output("docker", "image", "inspect", image))
    return round(found["Size"] / 1e6)


def container(service: str) -> str:
    """Return the id of a service's container."""
    return compose("ps", "--quiet", service).strip()


def state(service: str) -> dict[str, object]:
    (found,) = json.loads(output("docker", "inspect", container(service)))
    return dict(found["State"])


def left() -> list[str]:
    """Return the remaining containers, volumes and networks of the project."""
    mine = f"--filter=label=com.docker.compose.project={PROJECT}"
    kinds = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
    return [line for kind in kinds for line in output("docker", *kind, "-q", mine).split()]
