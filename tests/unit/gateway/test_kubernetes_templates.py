from __future__ import annotations

from pathlib import Path

import kubernetes.aio.client  # noqa: F401 - imported before the guard: it binds a port
import kubernetes_validate
import pytest
import yaml

from gateway.workers.launchers.kubernetes.home import Home
from gateway.workers.launchers.kubernetes.objects import check_templates, render_worker
from gateway.workers.launchers.kubernetes.resources import PodResources
from gateway.workers.launchers.kubernetes.templates import Object, read_templates
from tandem.errors import InvalidRequest
from tandem.protocol.worker import WorkerSpec
from tandem.settings.cluster import ClaimPoolSettings, KubernetesSettings

POOLS = [
    ClaimPoolSettings(name="gpu", roles=["trainer", "sampler"], device_class="gpu.nvidia.com"),
    ClaimPoolSettings(name="large", roles=["trainer"], device_class="gpu.nvidia.com", nodes=2),
]


def settings(folder: Path | None = None) -> KubernetesSettings:
    return KubernetesSettings(
        templates=folder, placement="shared", trainer_image="t", sampler_image="s"
    )


def home(folder: Path | None = None) -> Home:
    return Home(settings=settings(folder), namespace="n", volume=Path("/data"), epoch=1)


def written(folder: Path, template: object, *, kind: str = "trainer") -> Path:
    text = template if isinstance(template, str) else yaml.safe_dump(template)
    (folder / f"{kind}-pod.yaml").write_text(text)
    return folder


def a_template(spec: Object | None = None, **changes: object) -> Object:
    return {"apiVersion": "v1", "kind": "Pod", "spec": spec or {}} | changes


def check(folder: Path) -> None:
    check_templates(read_templates(settings(folder)), pools=POOLS, home=home(folder))


def pod_of(folder: Path) -> Object:
    spec = WorkerSpec(
        worker_id="trainer-a-0",
        kind="trainer",
        secret="",
        model_name="m",
        model_path="m",
        session_id="a",
        group="gpu-0",
    )
    (pod,) = render_worker(
        spec,
        pool=POOLS[0],
        template=read_templates(settings(folder))["trainer"],
        resources=PodResources(cpu="1", memory=2**30, shared_memory=2**20, ephemeral=2**30),
        home=home(folder),
    ).pods
    kubernetes_validate.validate(pod, "1.37", strict=True)
    return pod


def test_those_of_the_package_serve_where_an_administrator_has_none(tmp_path):
    check_templates(read_templates(settings()), pools=POOLS, home=home())
    written(tmp_path, a_template({"priorityClassName": "research"}))
    found = read_templates(settings(tmp_path))
    assert found["trainer"].body["spec"] == {"priorityClassName": "research"}
    assert found["sampler"] == read_templates(settings())["sampler"]


def test_a_pod_has_what_its_template_says_beside_what_is_the_worker_s(tmp_path):
    sidecar = {"name": "shipper", "image": "registry.test/shipper:2"}
    own = {
        "name": "worker",
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "resources": {"limits": {"rdma/hca": 1}, "requests": {"rdma/hca": 1}},
        "volumeMounts": [{"name": "corpus", "mountPath": "/corpus"}],
    }
    template = a_template(
        {
            "priorityClassName": "research",
            "securityContext": {"supplementalGroups": [44]},
            "containers": [sidecar, own],
            "volumes": [{"name": "corpus", "emptyDir": {}}],
        },
        metadata={"labels": {"team": "rl"}, "annotations": {"note": "x"}},
    )
    pod = pod_of(written(tmp_path, template))
    assert pod["metadata"]["labels"]["team"] == "rl"
    assert pod["metadata"]["labels"]["tandem.dev/worker"] == "trainer-a-0"
    assert pod["spec"]["priorityClassName"] == "research"
    assert pod["spec"]["securityContext"]["supplementalGroups"] == [44]
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert {"name": "corpus", "emptyDir": {}} in pod["spec"]["volumes"]
    shipper, worker = pod["spec"]["containers"]
    assert shipper == sidecar  # it gets no device
    assert own["env"][0] in worker["env"]
    assert worker["image"] == "t"
    assert worker["resources"]["limits"] == {
        "rdma/hca": 1,
        "memory": str(2**30),
        "ephemeral-storage": str(2**30),
    }
    assert {"/corpus", "/data/models"} <= {each["mountPath"] for each in worker["volumeMounts"]}


def test_the_worker_comes_first_where_the_template_does_not_name_it(tmp_path):
    sidecar = {"name": "shipper", "image": "s"}
    pod = pod_of(written(tmp_path, a_template({"containers": [sidecar]})))
    assert [each["name"] for each in pod["spec"]["containers"]] == ["worker", "shipper"]


OURS, ADDS = "the gateway sets it", "the gateway adds one with this"
SHARED_MEMORY = {"name": "x", "mountPath": "/dev/shm"}


def of_worker(container: Object) -> Object:
    return a_template({"containers": [{"name": "worker"} | container]})


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("", "is no Pod"),
        ("[]", "is no Pod"),
        ("{", "cannot be read: while parsing a flow"),
        (a_template(kind="Deployment"), "kind: it is 'Deployment'; a template is a Pod of v1"),
        (a_template(apiVersion="v2"), "apiVersion: it is 'v2'"),
        (a_template(status={}), "status: a template has none"),
        ({"apiVersion": "v1", "kind": "Pod"}, "spec: it is missing"),
        (a_template(spce={}), "spce: there is no such field"),
        (a_template({"nodeSelektor": {}}), "spec.nodeSelektor: there is no such field"),
        (
            of_worker({"envs": []}),
            "spec.containers[worker].envs: there is no such field",
        ),
        (
            a_template({"affinity": {"nodeAffinity": {"preferred": []}}}),
            "spec.affinity.nodeAffinity.preferred: there is no such field",
        ),
        (a_template({"nodeSelector": {"gpu": True}}), "spec.nodeSelector.gpu: it is True; it must"),
        (a_template({"nodeSelector": None}), "spec.nodeSelector: it is empty"),
        (a_template({"nodeSelector": ["a"]}), "spec.nodeSelector: it must be an object"),
        (a_template({"tolerations": {}}), "spec.tolerations: it must be a list"),
        (a_template({"priority": "high"}), "spec.priority: it is 'high'; it must be of the type"),
        (a_template({"containers": [{"name": "a"}] * 2}), "spec.containers: two are named a"),
        (a_template({"volumes": [{"name": "a"}] * 2}), "spec.volumes: two are named a"),
        (a_template({"containers": [{"image": "a"}]}), "spec.containers[0]: it has no name"),
        (
            of_worker({"env": [{"name": "A"}] * 2}),
            "spec.containers[worker].env: two are named A",
        ),
        (a_template(metadata={"name": "x"}), "metadata.name: a template may have labels"),
        (a_template(metadata={"ownerReferences": []}), "metadata.ownerReferences: a template may"),
        (
            a_template(metadata={"labels": {"tandem.dev/session": "x"}}),
            f"metadata.labels.tandem.dev/session: {OURS}",
        ),
        (a_template({"restartPolicy": "Never"}), f"spec.restartPolicy: {OURS}"),
        (a_template({"serviceAccountName": "x"}), f"spec.serviceAccountName: {OURS}"),
        (
            a_template({"securityContext": {"runAsNonRoot": False}}),
            f"spec.securityContext.runAsNonRoot: {OURS}",
        ),
        (
            of_worker({"image": "x"}),
            f"spec.containers[worker].image: {OURS}",
        ),
        (
            of_worker({"command": ["sh"]}),
            f"spec.containers[worker].command: {OURS}",
        ),
        (
            of_worker({"resources": {"limits": {"memory": "1Gi"}}}),
            f"spec.containers[worker].resources.limits.memory: {OURS}",
        ),
        (
            of_worker({"securityContext": {"capabilities": {"drop": []}}}),
            f"spec.containers[worker].securityContext.capabilities.drop: {OURS}",
        ),
        (
            of_worker({"env": [{"name": "HOME", "value": "/"}]}),
            f"spec.containers[worker].env[HOME]: {ADDS} name",
        ),
        (
            a_template({"volumes": [{"name": "tandem-shm", "emptyDir": {}}]}),
            f"spec.volumes[tandem-shm]: {ADDS} name",
        ),
        (
            of_worker({"volumeMounts": [SHARED_MEMORY]}),
            f"spec.containers[worker].volumeMounts[/dev/shm]: {ADDS} mountPath",
        ),
        (
            a_template({"resourceClaims": [{"name": "devices", "resourceClaimName": "mine"}]}),
            f"spec.resourceClaims[devices]: {ADDS} name",
        ),
    ],
)
def test_a_template_that_cannot_be_is_refused_with_its_field(tmp_path, template, fault):
    written(tmp_path, template)
    with pytest.raises(InvalidRequest) as raised:
        check(tmp_path)
    assert fault in raised.value.message
    assert "trainer-pod.yaml" in raised.value.message


def test_workers_without_an_image_are_refused_at_the_start():
    for name in ("trainer_image", "sampler_image"):
        without = settings().model_copy(update={name: ""})
        there = Home(settings=without, namespace="n", volume=Path("/data"), epoch=1)
        with pytest.raises(InvalidRequest, match=f"TANDEM_KUBERNETES_{name.upper()} is not set"):
            check_templates(read_templates(without), pools=POOLS, home=there)


def test_templates_that_keep_the_workers_of_a_claim_apart_are_refused(tmp_path):
    written(tmp_path, a_template({"nodeSelector": {"zone": "a"}}))
    with pytest.raises(InvalidRequest, match=r"spec\.nodeSelector of their templates must not"):
        check(tmp_path)
    same = {"nodeSelector": {"zone": "a", "tandem.dev/role": "sampler"}, "tolerations": []}
    written(tmp_path, a_template(same), kind="sampler")
    same["nodeSelector"] = {"zone": "a", "tandem.dev/role": "trainer"}  # ignored
    check(written(tmp_path, a_template(same)))
