"""The overlays of `k8s/` as kubectl renders them, and the rules of their NetworkPolicies."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from gateway.workers.launchers.kubernetes.home import Home
from gateway.workers.launchers.kubernetes.names import Role, role_of
from gateway.workers.launchers.kubernetes.objects import (
    WorkerObjects,
    render_preflight,
    render_worker,
)
from gateway.workers.launchers.kubernetes.resources import PodResources
from gateway.workers.launchers.kubernetes.templates import Template, read_templates
from tandem.agent.preflight import JobNeeds
from tandem.protocol.worker import JobSpec, WorkerKind, WorkerSpec
from tandem.settings.cluster import ClaimPoolSettings, KubernetesSettings
from tandem.settings.gateway import GatewaySettings
from tandem.settings.workers import TrainerSettings

K8S = Path(__file__).parents[3] / "k8s"
OVERLAYS = ("cpu-dev", "gpu-nfs", "monitoring")


@dataclass(frozen=True)
class Rendered:
    objects: list[dict]

    def all(self, kind: str) -> list[dict]:
        return [one for one in self.objects if one["kind"] == kind]

    def names(self, kind: str) -> list[str]:
        """Return the names without a generated digest."""
        return [_plain_name(one) for one in self.all(kind)]

    def one(self, kind: str, name: str) -> dict:
        (found,) = (one for one in self.all(kind) if _plain_name(one) == name)
        return found

    @property
    def settings(self) -> dict[str, str]:
        """The gateway's environment."""
        return self.one("ConfigMap", "tandem-settings")["data"]

    def gateway_settings(self, monkeypatch) -> GatewaySettings:
        for name, value in self.settings.items():
            monkeypatch.setenv(name, value)
        return GatewaySettings()

    @staticmethod
    def selects(selector: dict, labels: dict[str, str]) -> bool:
        if not selector.get("matchLabels", {}).items() <= labels.items():
            return False
        for term in selector.get("matchExpressions", []):
            assert term["operator"] in ("In", "Exists"), term
            there = labels.get(term["key"])
            if there is None or there not in term.get("values", [there]):
                return False
        return True


def _plain_name(one: dict) -> str:
    name = one["metadata"]["name"]
    if one["kind"] not in ("ConfigMap", "Secret"):
        return name
    return name.rpartition("-")[0]


def render_overlay(name: str, folder: Path, *, component: str = "") -> Rendered:
    """Render a copy of an overlay, with a further component, and example files for the secrets."""
    shutil.copytree(K8S, folder / "k8s", ignore=shutil.ignore_patterns("secrets"))
    shutil.copytree(K8S.parent / "deploy", folder / "deploy")
    overlay = folder / "k8s" / "overlays" / name
    file = overlay / "kustomization.yaml"
    content = yaml.safe_load(file.read_text())
    if component:
        content["components"] = [*content.get("components", []), f"../../components/{component}"]
        file.write_text(yaml.safe_dump(content))
    for generator in content["secretGenerator"]:
        for entry in generator["files"]:
            file = overlay / entry.rpartition("=")[2]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("example")
    done = subprocess.run(
        ["kubectl", "kustomize", str(overlay)], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return Rendered(list(yaml.safe_load_all(done.stdout)))


def pods_of(objects: list[dict]) -> dict[str, dict]:
    """Return the pod templates of all objects, by name."""
    kinds = ("Deployment", "StatefulSet", "Job")
    return {
        one["metadata"].get("name") or one["metadata"]["generateName"]: one["spec"]["template"]
        for one in objects
        if one["kind"] in kinds
    }


_JOB = JobSpec(framework="trl", folder="/data/jobs/s-ef56_train_0", argv=("python",))


def worker_pods(settings: dict[str, str]) -> dict[str, dict]:
    made = [pod for worker in workers(settings).values() for pod in worker.pods]
    template, home = _templates_and_home(settings)
    needs = JobNeeds(framework="trl", folder="/data/jobs/s-ab12_train_0", model="/data/models/tiny")
    made.append(render_preflight(needs, template=template["trainer"], home=home))
    return {pod["metadata"]["name"]: pod for pod in made}


def worker_policies(settings: dict[str, str]) -> list[dict]:
    return [each.policy for each in workers(settings).values() if each.policy is not None]


def workers(settings: dict[str, str]) -> dict[str, WorkerObjects]:
    """Return workers as a gateway makes them, by worker id.

    Two trainers on two nodes each, one on a single node (`trainer-alone`), a sampler and a job."""
    templates, home = _templates_and_home(settings)
    resources = PodResources(cpu="1", memory=2**30, shared_memory=2**28, ephemeral=2**30)
    made: dict[str, WorkerObjects] = {}
    kinds: tuple[tuple[str, WorkerKind, int], ...] = (
        ("trainer-s-ab12-0", "trainer", 2),
        ("trainer-s-cd34-0", "trainer", 2),
        ("trainer-alone", "trainer", 1),
        ("sampler-s-ab12-0", "sampler", 1),
        ("job-s-ef56-0", "job", 1),
    )
    for worker_id, kind, nodes in kinds:
        spec = WorkerSpec(
            worker_id=worker_id,
            kind=kind,
            secret="hidden",
            model_name="tiny",
            model_path="/data/models/tiny",
            session_id="s-ab12",
            group="some-0",
            trainer=TrainerSettings(ranks=nodes) if kind == "trainer" else None,
            job=_JOB if kind == "job" else None,
        )
        role = role_of(kind)
        pool = ClaimPoolSettings(
            name="some", roles=[role], device_class="gpu.nvidia.com", nodes=nodes
        )
        made[worker_id] = render_worker(
            spec, pool=pool, template=templates[role], resources=resources, home=home
        )
    return made


def _templates_and_home(settings: dict[str, str]) -> tuple[dict[Role, Template], Home]:
    prefix = "TANDEM_KUBERNETES_"
    chosen = {
        key.removeprefix(prefix).lower(): value
        for key, value in settings.items()
        if key.startswith(prefix)
    }
    kubernetes = KubernetesSettings(**(chosen | {"templates": K8S / "base" / "templates"}))
    home = Home(settings=kubernetes, namespace="tandem", volume=Path("/data"), epoch=1)
    return read_templates(kubernetes), home


# --- Network policies -------------------------------------------------------------------------


def reaches(
    policies: list[dict],
    source: dict[str, str],
    target: dict[str, str],
    port: int,
    *,
    from_namespace: str = "tandem",
    to_namespace: str = "tandem",
) -> bool:
    """Return whether a pod with labels `source` may connect to one with labels `target`.

    The rules of both pods count, except those of another namespace than `tandem`."""
    into = to_namespace != "tandem" or _allows(
        policies, "ingress", target, port, other=source, namespace=from_namespace
    )
    return into and (
        from_namespace != "tandem"
        or _allows(policies, "egress", source, port, other=target, namespace=to_namespace)
    )


def _allows(
    policies: list[dict],
    direction: str,
    labels: dict[str, str],
    port: int,
    *,
    other: dict[str, str],
    namespace: str,
) -> bool:
    mine = [
        policy["spec"]
        for policy in policies
        if Rendered.selects(policy["spec"]["podSelector"], labels)
        and direction.capitalize() in policy["spec"]["policyTypes"]
    ]
    if not mine:
        return True
    peers = "from" if direction == "ingress" else "to"
    return any(
        (peers not in rule or any(_is_peer(each, other, namespace) for each in rule[peers]))
        and ("ports" not in rule or any(each["port"] == port for each in rule["ports"]))
        for spec in mine
        for rule in spec.get(direction, [])
    )


def _is_peer(peer: dict, labels: dict[str, str], namespace: str) -> bool:
    if "ipBlock" in peer:  # blocks outside of the cluster, as the plugins define them
        return False
    there = {"kubernetes.io/metadata.name": namespace}
    if "namespaceSelector" in peer:
        if not Rendered.selects(peer["namespaceSelector"], there):
            return False
    elif namespace != "tandem":
        return False
    return Rendered.selects(peer.get("podSelector", {}), labels)
