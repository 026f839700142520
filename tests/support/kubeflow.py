"""TrainJobs of tests, and parts of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.backends.description import BackendDescription
from tandem.backends.jobs import JobResources
from tandem.backends.kubeflow import RESERVED, render_trainjob
from tandem.backends.rendering import configure
from tests.support.trl_configurations import TRL

Manifest = dict[str, Any]


def rendered(
    values: Mapping[str, object],
    resources: JobResources | None = None,
    *,
    backend: BackendDescription = TRL,
    name: str = "sums",
    model: str = "s3://models/tiny",
    data: str = "hf://someone/sums",
) -> tuple[Manifest, Manifest]:
    return render_trainjob(
        backend,
        configure(TRL if backend.kind == "step" else backend, values),
        name=name,
        model=model,
        data=data,
        image="registry.example.org/tandem-trl:0.2.0",
        initializers="registry.example.org/kubeflow/trainer",
        resources=resources or JobResources(),
    )


def of_node(template: Manifest) -> Manifest:
    """Return the job template of `node` in a JobSet's template."""
    jobs = template["spec"]["replicatedJobs"]
    found: Manifest = next(each for each in jobs if each["name"] == "node")["template"]
    return found


def node_pod(runtime: Manifest) -> Manifest:
    found: Manifest = of_node(runtime["spec"]["template"])["spec"]["template"]["spec"]
    return found


def node_variables(trainer: Manifest, node: int, *, port: int) -> dict[str, str]:
    """Return the variables that Kubeflow's torch plugin sets in the pod of a node, if all nodes are
    on this machine."""
    values = (trainer["numNodes"], trainer["numProcPerNode"], node, "127.0.0.1", port)
    return dict(zip(RESERVED, map(str, values), strict=True))
