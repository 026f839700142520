"""The place and owner of a gateway's objects, and the fixed fields of these objects."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import yaml

from gateway.workers.launchers.kubernetes.names import EPOCH, INSTANCE, PART_OF, Resource
from gateway.workers.launchers.kubernetes.templates import Object
from tandem.settings.cluster import KubernetesSettings


@dataclass(frozen=True, kw_only=True)
class Home:
    """The place and owner of objects from a gateway of this `epoch`. The owner is the Deployment
    `settings.instance` with the uid `owner`, or nobody for "". `volume` is the shared volume's
    path."""

    settings: KubernetesSettings
    namespace: str
    volume: Path
    epoch: int
    owner: str = ""

    def new(
        self, resource: Resource, name: str, *, labels: Object, annotations: Object, **rest: object
    ) -> Object:
        """Return an object. `rest` are its fields besides the metadata."""
        metadata: Object = {
            "name": name,
            "namespace": self.namespace,
            "labels": {PART_OF: "tandem", INSTANCE: self.settings.instance, **labels},
            "annotations": {EPOCH: str(self.epoch), **annotations},
        }
        if self.owner:
            owner = {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": self.settings.instance,
                "uid": self.owner,
            }
            metadata["ownerReferences"] = [owner]
        about = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}
        return about | rest


def fixed(part: str) -> Object:
    """Return a part of `worker-objects.yaml`."""
    found: Object = deepcopy(_fixed_parts()[part])
    return found


@cache
def _fixed_parts() -> Object:
    text = (files(__package__) / "defaults" / "worker-objects.yaml").read_text()
    parts: Object = yaml.safe_load(text)
    return parts
