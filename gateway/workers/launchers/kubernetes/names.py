"""How the objects of workers and claims are named and labelled.

Their names follow from the worker's id, and from the group's; labels tell them from all others. A
label holds less than an id may: what does not fit is shortened, and an annotation has the whole.
"""

from __future__ import annotations

import hashlib
import re

from tandem.settings.cluster import ClaimPoolSettings

CONTAINER = "worker"
"""The name of the worker's container; others in its pod are an administrator's."""
PART_OF, COMPONENT = "app.kubernetes.io/part-of", "app.kubernetes.io/component"
INSTANCE, WORKER, SESSION, GROUP, NODE = (
    f"tandem.dev/{name}" for name in ("instance", "worker", "session", "group", "node")
)
EPOCH, GROUP_SPEC = "tandem.dev/epoch", "tandem.dev/group-spec"
WORKER_ID, SESSION_ID = "tandem.dev/worker-id", "tandem.dev/session-id"
SPEC_KEY = "spec.json"

PORT, METRICS_PORT, RENDEZVOUS_PORT = 7300, 7301, 7302
"""Each pod has an address of its own, so that all may have the same ports."""

_LONGEST_NAME = 58
"""Of a worker's objects: a label of DNS has 63 characters, and pods add the number of a node."""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def object_name(worker_id: str) -> str:
    """Return the name of a worker's objects: its id, if that is one.

    Literal examples: `trainer-s-ab12-0` is its own; `sampler-Ann_1-0` is
    `sampler-ann-1-0-3f2a9c51d0`.
    """
    if _NAME.fullmatch(worker_id) and len(worker_id) <= _LONGEST_NAME:
        return worker_id
    words = re.sub(r"[^a-z0-9]+", "-", worker_id.lower()).strip("-")
    return _shortened(f"w-{words}" if not words[:1].isalpha() else words, worker_id, _LONGEST_NAME)


def label_value(text: str) -> str:
    """Return what stands for a text in a label: itself, if a label can hold it."""
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
    """Literal examples: `tandem-train-0`; of a pool with several nodes `tandem-train-0-1`."""
    name = f"{instance}-{group}"
    return name if pool.nodes == 1 else f"{name}-{node}"


def pool_name(group: str) -> str:
    """Return the name of the pool of a device group: `train` for `train-0`."""
    return group.rpartition("-")[0]
