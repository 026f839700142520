"""Kinds, names and labels of workers' objects and claims. Names derive from the id of the worker or
group. A long id is shortened in a label, and an annotation holds the whole."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tandem.protocol.worker import WorkerKind
from tandem.settings.cluster import ClaimPoolSettings, KubernetesSettings

Role: TypeAlias = Literal["trainer", "sampler"]

CONTAINER = "worker"
"""The worker's container. Others in its pod are an administrator's."""
PART_OF, COMPONENT = "app.kubernetes.io/part-of", "app.kubernetes.io/component"
INSTANCE, WORKER, SESSION, GROUP, NODE, FRAMEWORK = (
    f"tandem.dev/{name}" for name in ("instance", "worker", "session", "group", "node", "framework")
)
EPOCH, GROUP_SPEC = "tandem.dev/epoch", "tandem.dev/group-spec"
WORKER_ID, SESSION_ID = "tandem.dev/worker-id", "tandem.dev/session-id"
SPEC_KEY = "spec.json"

PORT, METRICS_PORT, RENDEZVOUS_PORT = 7300, 7301, 7302
"""Fixed ports, because each pod has its own address, also in `defaults/worker-objects.yaml`."""

_LONGEST_NAME = 58
"""A DNS label has 63 characters, and pods append a node number."""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def object_name(worker_id: str) -> str:
    """Return the name of a worker's objects: its id, if valid.

    Examples: `trainer-s-ab12-0` stays; `sampler-Ann_1-0` becomes
    `sampler-ann-1-0-3f2a9c51d0`."""
    if _NAME.fullmatch(worker_id) and len(worker_id) <= _LONGEST_NAME:
        return worker_id
    words = re.sub(r"[^a-z0-9]+", "-", worker_id.lower()).strip("-")
    return _shortened(f"w-{words}" if not words[:1].isalpha() else words, worker_id, _LONGEST_NAME)


def label_value(text: str) -> str:
    """Return a text's label value: the text itself, if valid."""
    if _LABEL.fullmatch(text) and len(text) <= 63:
        return text
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-")
    return _shortened(words or "x", text, 63)


def _shortened(words: str, text: str, longest: int) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    return f"{words[: longest - len(digest) - 1].rstrip('._-')}-{digest}"


def pod_name(worker_id: str, node: int) -> str:
    return object_name(worker_id) if node == 0 else f"{object_name(worker_id)}-{node}"


def claim_name(group: str, *, pool: ClaimPoolSettings, node: int, instance: str) -> str:
    """Examples: `tandem-train-0`; with several nodes per claim `tandem-train-0-1`."""
    name = f"{instance}-{group}"
    return name if pool.nodes == 1 else f"{name}-{node}"


def pool_name(group: str) -> str:
    """Return a device group's pool: `train` for `train-0`."""
    return group.rpartition("-")[0]


def role_of(kind: WorkerKind) -> Role:
    """Return whose image, template and account a pod has. A job's pod has those of trainers."""
    return "sampler" if kind == "sampler" else "trainer"


def service_account(role: Role, settings: KubernetesSettings) -> str:
    """Return the account of a role's workers, which do not get its token."""
    return f"{settings.instance}-{role}"


# --- Kinds of objects ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Resource:
    kind: str
    api_version: str
    plural: str

    @property
    def path(self) -> str:
        root = "/apis" if "/" in self.api_version else "/api"
        return f"{root}/{self.api_version}/namespaces/{{namespace}}/{self.plural}"


PODS = Resource("Pod", "v1", "pods")
SECRETS = Resource("Secret", "v1", "secrets")
SERVICES = Resource("Service", "v1", "services")
POLICIES = Resource("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies")
DEPLOYMENTS = Resource("Deployment", "apps/v1", "deployments")
EVENTS = Resource("Event", "v1", "events")
CLAIMS = Resource("ResourceClaim", "resource.k8s.io/v1", "resourceclaims")
