"""Kubeflow's own package reads our TrainJobs, and torchrun their variables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch.distributed.run
import yaml

from tandem.backends.jobs import JobResources
from tests.support.kubeflow import Manifest, node_variables, rendered

TWO_NODES = JobResources(processes=2, nodes=2)
PACKAGES = Path(sys.prefix) / "kubeflow"
OFFERS = (
    JobResources(),
    JobResources(processes=8, device="cuda"),
    JobResources(processes=2, nodes=4, device="cuda"),
)
SCRIPT = """
import json, sys, yaml
from kubeflow.trainer.backends.kubernetes.utils import get_runtime_trainer
from kubeflow.trainer.constants.constants import RUNTIME_FRAMEWORK_LABEL
from kubeflow_trainer_api.models import (
    TrainerV1alpha1ClusterTrainingRuntime as Runtime, TrainerV1alpha1TrainJob as TrainJob
)

classes = {each.__name__.removeprefix("TrainerV1alpha1"): each for each in (Runtime, TrainJob)}
documents = list(yaml.safe_load_all(sys.stdin))
parsed = [classes[each["kind"]].from_dict(each) for each in documents]
trainers = [
    get_runtime_trainer(
        each.metadata.labels[RUNTIME_FRAMEWORK_LABEL],
        each.spec.template.spec.replicated_jobs,
        each.spec.ml_policy,
    )
    for each in parsed
    if isinstance(each, Runtime)
]
print(json.dumps({
    "dumped": [each.to_dict() for each in parsed],
    "schemas": {name: each.model_json_schema() for name, each in classes.items()},
    "trainers": [[each.framework, each.image, each.num_nodes] for each in trainers],
}))
"""
NUMBER_OR_TEXT = (
    "IoK8sApimachineryPkgApiResourceQuantity",
    "IoK8sApimachineryPkgUtilIntstrIntOrString",
)

needs_kubeflow = pytest.mark.skipif(
    not PACKAGES.is_dir(), reason="kubeflow is not installed: scripts/kubeflow.sh"
)


@pytest.fixture(scope="module")
def documents() -> list[Manifest]:
    values = ({"method": "sft"}, {"method": "grpo"}, {"method": "dpo", "lora_rank": 8})
    pairs = (rendered(each, offer) for each, offer in zip(values, OFFERS, strict=True))
    return [document for pair in pairs for document in pair]


@pytest.fixture(scope="module")
def found(documents):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PYTHONPATH": str(PACKAGES), "PATH": "/usr/bin:/bin"},
        input=yaml.safe_dump_all(documents),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@needs_kubeflow
def test_kubeflows_models_return_every_field_unchanged(documents, found):
    assert found["dumped"] == documents


@needs_kubeflow
def test_kubeflows_schemas_know_every_field(documents, found):
    for document in documents:
        schema = jsonschema.Draft202012Validator(strict(found["schemas"][document["kind"]]))
        schema.validate(document)
        assert not schema.is_valid(document | {"spec": document["spec"] | {"numNodes": 1}})


@needs_kubeflow
def test_kubeflows_sdk_finds_the_trainer_of_each_runtime(found):
    assert found["trainers"] == [["trl", "registry.example.org/tandem-trl:0.2.0", 1]] * 3


@pytest.mark.parametrize("node", [0, 1])
def test_the_launcher_reads_the_ranks_of_kubeflows_nodes(monkeypatch, node):
    trainer = rendered({"method": "sft"}, TWO_NODES)[1]["spec"]["trainer"]
    for name, value in node_variables(trainer, node, port=29500).items():
        monkeypatch.setenv(name, value)
    assert trainer["command"][1:] == ["-m", torch.distributed.run.__name__]
    read = torch.distributed.run.get_args_parser().parse_args(trainer["args"])
    config, _program, arguments = torch.distributed.run.config_from_args(read)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 2)
    assert config.rdzv_backend == "static"
    assert (config.rdzv_configs["rank"], config.rdzv_endpoint) == (node, "127.0.0.1:29500")
    assert [each for each in arguments if not each.startswith("-")][-1] == trainer["args"][-1]


def strict(schema: Manifest) -> Manifest:
    """Refuse unknown fields. The package describes numbers that may be text by its own classes."""
    parts: dict[str, Manifest] = schema["$defs"]
    for name, part in (*parts.items(), ("", schema)):
        if part.get("properties"):
            part["additionalProperties"] = False
        if name in NUMBER_OR_TEXT:
            part.clear()
            part["type"] = ["number", "string"]
    return schema
