"""An installation of Tandem in a namespace of its own, made and removed like an operator's."""

from __future__ import annotations

import io
import json
import tarfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import tinker

from tandem.demo.tiny_model import write_tiny_model
from tests.cluster import settings
from tests.cluster.artefacts import keep
from tests.cluster.kubectl import Kubectl
from tests.cluster.overlay import USERS, write_overlay
from tests.cluster.port_forward import PortForward
from tests.support.stacks import TIED, write_qwen
from tests.support.waiting import wait_until

DEMO = "tandem/tiny-addition-0"
_DATA = "/var/lib/tandem"
_MADE = "tandem.dev/instance=tandem"
_KINDS = "pods,secrets,services,networkpolicies,resourceclaims.resource.k8s.io"
_FOLDERS = ("weights", "checkpoints", "snapshots", "spill")
_SECONDS = 300.0


@dataclass(frozen=True)
class Installation:
    """`key` is the first admin key."""

    kubectl: Kubectl
    url: str
    key: str

    def service(self, **arguments) -> tinker.ServiceClient:
        """The unmodified SDK, connected to the leader."""
        return tinker.ServiceClient(base_url=self.url, api_key=self.key, **arguments)

    def ask(self, path: str, *, body: dict | None = None) -> dict:
        """GET a path, or POST a body to it."""
        method, headers = "GET" if body is None else "POST", {"X-API-Key": self.key}
        url = f"{self.url}/{path}"
        answer = httpx.request(method, url, headers=headers, json=body, timeout=60)
        answer.raise_for_status()
        return answer.json()

    # --- Objects and files ------------------------------------------------------------------------

    def serving(self) -> str:
        """The name of the leader's pod, once there is a leader."""

        def one() -> str:
            names = self.kubectl.names("pods", "tandem.dev/serving=tandem")
            return names[0].partition("/")[2] if len(names) == 1 else ""

        return wait_until(one, what="one gateway serves", timeout=_SECONDS)

    def worker(self, kind: str) -> dict:
        """The pod of the only trainer, or sampler, once it runs."""
        labels = f"{_MADE},app.kubernetes.io/component={kind}"

        def one() -> dict | None:
            pods = self.kubectl.all("pods", labels)
            alone = len(pods) == 1 and "deletionTimestamp" not in pods[0]["metadata"]
            return pods[0] if alone and pods[0]["status"]["phase"] == "Running" else None

        return wait_until(one, what=f"one {kind} runs", timeout=_SECONDS)

    def node_of(self, component: str) -> str:
        (pod,) = self.kubectl.all("pods", f"app.kubernetes.io/component={component}")
        return pod["spec"]["nodeName"]

    def made(self) -> list[str]:
        """The objects that the gateway has made and not removed."""
        return self.kubectl.names(_KINDS, _MADE)

    def files(self) -> list[str]:
        """The files of runs in the volume."""
        folders = [f"{_DATA}/{name}" for name in _FOLDERS]
        return self.inside("find", *folders, "-type", "f").split()

    def inside(self, *command: str, given: bytes = b"") -> str:
        """Run a command in the leader's pod."""
        return self.kubectl("exec", "--stdin", self.serving(), "--", *command, given=given)

    def nothing_left(self) -> None:
        """Delete the checkpoints of runs, and wait until all their other objects are gone."""
        client = tinker.RestClient(base_url=self.url, api_key=self.key)
        for each in client.list_user_checkpoints().result().checkpoints:
            client.delete_checkpoint_from_tinker_path(each.tinker_path).result()
        wait_until(lambda: not self.made(), what="no object is left", timeout=_SECONDS)
        wait_until(lambda: not self.files(), what="no file is left", timeout=_SECONDS)
        status = self.ask("api/tandem/v1/status")
        for name in ("sessions", "runs", "samplers", "workers"):
            assert not status[name], status[name]

    def add_model(self, name: str, folder: Path) -> None:
        """Copy a model from a disk of this machine into the volume, and register it."""
        path = f"{_DATA}/models/{name}"
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(folder, ".")
        self.inside("mkdir", "--parents", path)
        unpack = ("tar", "--extract", "--no-same-owner", "--directory", path)
        self.inside(*unpack, given=packed.getvalue())
        self.inside("tandem", "models", "add", name, path)

    def logs(self) -> str:
        """The leader's log."""
        return self.kubectl("logs", self.serving())

    def keep(self, name: str) -> None:
        """Write the state of the namespace into a folder of the artefacts."""
        if settings.ARTEFACTS:
            keep(self.kubectl, settings.ARTEFACTS / self.kubectl.namespace / name)

    def tell(self) -> str:
        """The state of the cluster and the logs, to explain a failure."""
        commands = (
            ("get", f"{_KINDS},pvc", "--output", "wide"),
            ("get", "events", "--sort-by", ".lastTimestamp"),
            ("logs", "--prefix", "--tail=150", "-l", "app.kubernetes.io/component=gateway"),
        )
        return "\n".join(self.kubectl.run(*each).stdout.decode() for each in commands)


@contextmanager
def installed(folder: Path) -> Iterator[Installation]:
    """Install Tandem with its models. At the end, remove it and everything made for it."""
    namespace = f"tandem-test-{uuid.uuid4().hex[:8]}"
    kubectl = Kubectl(namespace)
    overlay = write_overlay(folder, namespace)
    shared = kubectl.names("priorityclass")
    try:
        if settings.SHARED_FOLDER:
            _in_shared_folder(namespace, _MAKE)
        kubectl("apply", "--server-side", "--kustomize", str(overlay))
        wait = ("rollout", "status", f"--timeout={_SECONDS:.0f}s")
        for each in ("statefulset/tandem-database", "deployment/tandem"):
            kubectl(*wait, each, seconds=_SECONDS + 10)
        with PortForward(kubectl) as forward:
            wait_until(forward.serves, what="a gateway serves", timeout=_SECONDS)
            key = (overlay.parent / "cpu-dev" / "secrets" / "first-key").read_text()
            installation = Installation(kubectl, forward.url, key)
            write_tiny_model(folder / "demo", seed=0)
            installation.add_model(DEMO, folder / "demo")
            installation.add_model(TIED, write_qwen(folder / "tied", seed=0))
            yield installation
    finally:
        if settings.ARTEFACTS:
            keep(kubectl, settings.ARTEFACTS / namespace / "end")
        _remove(kubectl, [each for each in _classes(kubectl) if each not in shared])


def _classes(kubectl: Kubectl) -> list[str]:
    return kubectl.names("priorityclass", "app.kubernetes.io/part-of=tandem")


def _remove(kubectl: Kubectl, classes: list[str]) -> None:
    namespace = kubectl.namespace
    gone = ("--ignore-not-found", f"--timeout={_SECONDS:.0f}s")
    kubectl("delete", "namespace", namespace, *gone, seconds=_SECONDS + 10)
    if settings.SHARED_FOLDER:
        names = [f"{namespace}-{name}" for name in USERS]
        kubectl("delete", "persistentvolume", *names, *gone, seconds=_SECONDS + 10)
        _in_shared_folder(namespace, _REMOVE)
    if classes:
        kubectl("delete", *classes, *gone)


# --- The shared folder ----------------------------------------------------------------------------

_MAKE = f"""
import os, sys
for name, user in {USERS}.items():
    os.makedirs(f"{{sys.argv[1]}}/{{name}}")
    os.chown(f"{{sys.argv[1]}}/{{name}}", user, user)
"""
_REMOVE = """
import shutil, sys
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


def _in_shared_folder(namespace: str, program: str) -> None:
    """Run a program as root in the shared folder, in a pod of a namespace that allows it."""
    kubectl = Kubectl(f"{namespace}-folder")
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    container = {
        "name": "folder",
        "image": settings.IMAGES["gateway"],
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", program, namespace],
        "workingDir": "/shared",
        "securityContext": {"runAsUser": 0},
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
    }
    folder = {"path": settings.SHARED_FOLDER, "type": "Directory"}
    pod = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [{"name": "shared", "hostPath": folder}],
    }
    objects = (
        ("Namespace", {"name": kubectl.namespace, "labels": labels}, {}),
        ("ServiceAccount", {"name": "default"}, {}),
        ("Pod", {"name": "folder"}, {"spec": pod}),
    )
    try:
        for kind, metadata, about in objects:
            made = {"apiVersion": "v1", "kind": kind, "metadata": metadata, **about}
            kubectl("apply", "--server-side", "--filename", "-", given=json.dumps(made).encode())
        ended = "--for=jsonpath={.status.phase}=Succeeded"
        kubectl("wait", ended, f"--timeout={_SECONDS:.0f}s", "pod/folder", seconds=_SECONDS + 10)
    finally:
        kubectl("delete", "namespace", kubectl.namespace, "--ignore-not-found", seconds=_SECONDS)
