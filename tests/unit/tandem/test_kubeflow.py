"""A job as a TrainJob of Kubeflow and its runtime."""

from __future__ import annotations

import json
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.jobs.files import write_request
from gateway.jobs.job import Job, JobPlan
from tandem.backends.description import BackendDescription
from tandem.backends.jobs import JobPaths, JobResources
from tandem.backends.kubeflow import RESERVED, image_paths
from tandem.backends.registry import descriptions
from tandem.backends.rendering import configure, render_job
from tandem.backends.trl import TrlConfiguration
from tandem.errors import InvalidField, UnsupportedByBackend
from tests.support.kubeflow import node_pod, of_node, rendered
from tests.support.trl_configurations import TRL, values

ROOT = Path(__file__).parents[3]
resources = st.builds(
    JobResources,
    processes=st.sampled_from([1, 2, 8]),
    nodes=st.sampled_from([1, 2]),
    device=st.sampled_from(["cpu", "cuda"]),
)


@settings(max_examples=200, deadline=None)
@given(values, resources)
def test_two_renders_of_a_job_are_equal_and_survive_yaml(given_values, offered):
    given_values.pop("group_size", None)
    given_values |= {"batch_size": 8}
    documents = rendered(given_values, offered)
    assert documents == rendered(given_values, offered)
    text = yaml.safe_dump_all(documents, sort_keys=False)
    assert tuple(yaml.safe_load_all(text)) == documents
    assert "&id" not in text  # no part is shared with another


def test_a_trainjob_runs_the_command_of_a_job_with_its_ranks():
    offered = JobResources(processes=2, nodes=3, device="cuda")
    runtime, job = rendered({"method": "dpo", "lora_rank": 8}, offered)
    made = configure(TRL, {"method": "dpo", "lora_rank": 8})
    spec = render_job(TRL, made, image_paths(TRL), 6)
    trainer = job["spec"]["trainer"]
    assert (*trainer["command"], *trainer["args"]) == spec.argv
    assert trainer["command"][1:] == ["-m", "torch.distributed.run"]
    assert {each["name"]: each["value"] for each in trainer["env"]} == spec.environment
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (3, 2)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "2"}}
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]


def test_a_job_without_gpus_asks_for_a_core_of_each_process():
    _runtime, job = rendered({"method": "sft"}, JobResources(processes=4))
    assert job["spec"]["trainer"]["resourcesPerNode"] == {"requests": {"cpu": "4"}}


def test_the_nodes_read_the_same_request_as_in_a_job_of_tandem(tmp_path):
    """Their `job.json` is an annotation of their pods."""
    runtime, job = rendered({"method": "sft"}, JobResources(processes=2, nodes=2))
    patch = of_node(job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"])
    ((annotation, text),) = patch["spec"]["template"]["metadata"]["annotations"].items()
    request = json.loads(text)
    (file,) = next(each for each in node_pod(runtime)["volumes"] if each["name"] == "job")[
        "downwardAPI"
    ]["items"]
    assert file["fieldRef"]["fieldPath"] == f"metadata.annotations['{annotation}']"
    (mount,) = (
        each
        for each in node_pod(runtime)["containers"][0]["volumeMounts"]
        if each.get("subPath") == file["path"]
    )
    assert job["spec"]["trainer"]["args"][-2:] == ["--job", mount["mountPath"]]
    assert (request["processes"], request["attempt"]) == (4, 1)
    assert configure(TRL, request["configuration"]) == configure(TRL, {"method": "sft"})

    model = BaseModelEntry(name="tiny", path="/m", max_length=None)
    plan = JobPlan(backend="trl", configuration={}, processes=4, ttl=1.0)
    own = Job(run_id="r", session_id="s", owner="o", model=model, plan=plan, folder=tmp_path)
    write_request(own)
    assert json.loads((tmp_path / "job.json").read_text()).keys() == request.keys()


def test_nodes_start_after_both_initialisers_and_find_their_files():
    runtime, job = rendered({"method": "sft"})
    *initialisers, node = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    names = [each["name"] for each in initialisers]
    assert names == ["dataset-initializer", "model-initializer"]
    assert node["dependsOn"] == [{"name": name, "status": "Complete"} for name in names]
    assert [each["name"] for each in node_pod(runtime)["containers"]] == ["node"]
    assert job["spec"]["initializer"] == {
        "dataset": {"storageUri": "hf://someone/sums"},
        "model": {"storageUri": "s3://models/tiny"},
    }
    mounts = {
        each["mountPath"]: each for each in node_pod(runtime)["containers"][0]["volumeMounts"]
    }
    paths = image_paths(TRL)
    assert mounts[f"{paths.folder}/data"]["subPath"] == "dataset"
    assert paths.model == "/workspace/model"


def test_pods_runtime_and_job_carry_the_framework():
    runtime, job = rendered({"method": "sft"})
    pod = of_node(runtime["spec"]["template"])["spec"]["template"]
    for each in (runtime, job, pod):
        assert each["metadata"]["labels"]["tandem.dev/framework"] == "trl"
    assert runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] == "trl"
    assert runtime["spec"]["mlPolicy"]["torch"] == {}


def test_jobs_of_one_node_and_of_several_have_runtimes_of_their_own():
    """A volume of one node cannot be mounted on another one."""
    one, _ = rendered({"method": "sft"})
    several, _ = rendered({"method": "sft"}, JobResources(nodes=2))
    assert one == rendered({"method": "dpo"})[0]
    assert one["metadata"]["name"] != several["metadata"]["name"]
    modes = [
        each["spec"]["template"]["spec"]["volumeClaimPolicies"][0]["templates"][0]["spec"]
        for each in (one, several)
    ]
    assert [each["accessModes"] for each in modes] == [["ReadWriteOnce"], ["ReadWriteMany"]]


def test_kubernetes_knows_every_field_of_the_nodes_pod():
    runtime, _job = rendered({"method": "sft"}, JobResources(nodes=2, device="cuda"))
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "node"},
        "spec": node_pod(runtime),
    }
    kubernetes_validate.validate(pod, "1.37", strict=True)


def test_the_paths_of_the_program_are_those_of_the_image():
    text = (ROOT / "deploy" / f"{TRL.framework}.Dockerfile").read_text()
    version = re.search(r"BASE_IMAGE=python:(\d+\.\d+)\.", text)
    assert version is not None
    paths = image_paths(TRL)
    assert f"/lib/python{version[1]}/site-packages/" in paths.program
    assert "WORKDIR /opt/tandem\n" in text
    pod = node_pod(rendered({"method": "sft"})[0])
    assert f"USER {pod['securityContext']['runAsUser']}:" in text
    assert (ROOT / "trainer_service/jobs" / Path(paths.program).name / "train.py").exists()


# --- Refusals ---------------------------------------------------------------------------------


def test_a_step_backend_is_refused():
    fsdp2 = descriptions()["fsdp2"]
    assert isinstance(fsdp2, BackendDescription)
    with pytest.raises(UnsupportedByBackend, match="a TrainJob is a whole job"):
        rendered({"method": "sft"}, backend=fsdp2)


@pytest.mark.parametrize("name", RESERVED)
def test_a_backend_that_sets_the_ranks_itself_is_refused(name):
    class Ranked(TrlConfiguration):
        def environment(self, paths: JobPaths) -> dict[str, str]:
            return {name: "1"}

    backend = BackendDescription("mine", "job", "trl", (), Ranked)
    with pytest.raises(UnsupportedByBackend, match=f"sets {name}, which Kubeflow sets"):
        rendered({"method": "sft"}, backend=backend)


def test_a_launcher_that_ignores_the_ranks_is_refused():
    class Accelerated(TrlConfiguration):
        def command(self, paths: JobPaths) -> tuple[str, ...]:
            return ("accelerate", "launch")

    backend = BackendDescription("mine", "job", "trl", (), Accelerated)
    with pytest.raises(UnsupportedByBackend, match="does not read the PET_ variables"):
        rendered({"method": "sft"}, backend=backend)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "Sums"),
        ("name", "1st"),
        ("name", "sums-"),
        ("name", "s" * 33),
        ("name", ""),
        ("model", "tiny"),
        ("model", "/models/tiny"),
        ("data", "train.jsonl"),
        ("data", "file:///train.jsonl"),
        ("data", "hf://some one/sums"),
    ],
)
def test_a_name_or_place_that_the_cluster_cannot_use_is_refused(field, value):
    with pytest.raises(InvalidField) as raised:
        rendered({"method": "sft"}, **{field: value})
    assert raised.value.field == field


def test_resources_that_the_configuration_cannot_use_are_refused():
    with pytest.raises(InvalidField, match="8 completions") as raised:
        rendered({"method": "grpo", "group_size": 6}, JobResources(processes=2))
    assert raised.value.field == "group_size"
