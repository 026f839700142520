from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Literal

import kubernetes.aio.client  # noqa: F401 - imported before the guard: it binds a port
import kubernetes_validate
import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gateway.workers.launchers.kubernetes.home import Home
from gateway.workers.launchers.kubernetes.names import (
    CONTAINER,
    GROUP_SPEC,
    label_value,
    object_name,
    pod_name,
)
from gateway.workers.launchers.kubernetes.objects import (
    LIFELINE,
    WorkerObjects,
    render_claims,
    render_worker,
    spec_of_pod,
)
from gateway.workers.launchers.kubernetes.resources import PodResources
from gateway.workers.launchers.kubernetes.templates import Object, read_templates
from tandem.protocol.certificate import Certificate
from tandem.protocol.worker import WorkerSpec
from tandem.settings.cluster import ClaimPoolSettings, KubernetesSettings
from tandem.settings.sharing import Sharing
from tandem.settings.workers import SamplerSettings, TrainerSettings

GOLDEN = Path(__file__).parents[2] / "golden"
VERSIONS = ("1.34", "1.37")
RESOURCES = PodResources(cpu="4", memory=2**33, shared_memory=2**28, ephemeral=2**33)
IMAGES = {"trainer_image": "registry.test/trainer:1", "sampler_image": "registry.test/sampler:1"}

GPUS = {"name": "train", "roles": ["trainer"], "device_class": "gpu.nvidia.com", "devices": 4}


def a_pool(**changes: object) -> ClaimPoolSettings:
    return ClaimPoolSettings.model_validate(GPUS | changes)


CPUS = a_pool(device_class="")
SLICED = a_pool(sharing="time_slice")
ALTERNATIVES = [{"device_class": "a", "selectors": ["true"]}] * 8


def home(**settings: object) -> Home:
    return Home(
        settings=KubernetesSettings(**(IMAGES | settings)),
        namespace="research",
        volume=Path("/data"),
        epoch=7,
        owner="7c4f",
    )


def a_spec(kind="trainer", *, ranks: int = 4, **changes: object) -> WorkerSpec:
    return WorkerSpec(
        **{
            "worker_id": f"{kind}-s-ab12-0",
            "kind": kind,
            "secret": "hidden-secret",
            "model_name": "tiny",
            "model_path": "/data/models/tiny",
            "session_id": "s-ab12",
            "group": "train-0",
            "trainer": TrainerSettings(ranks=ranks) if kind == "trainer" else None,
        }
        | changes
    )


def rendered(spec: WorkerSpec, pool: ClaimPoolSettings, **settings: object) -> WorkerObjects:
    there = home(**settings)
    template = read_templates(there.settings)[spec.kind]
    return render_worker(spec, pool=pool, template=template, resources=RESOURCES, home=there)


def all_of(objects: WorkerObjects) -> list[Object]:
    network = [each for each in (objects.service, objects.policy) if each is not None]
    return [objects.secret, *network, *objects.claims, *objects.pods]


def container(pod: Object) -> Object:
    (found,) = [each for each in pod["spec"]["containers"] if each["name"] == CONTAINER]
    return found


EVERY_KIND = pytest.mark.parametrize(
    ("spec", "pool"),
    [
        (a_spec(), a_pool()),
        (a_spec(), CPUS),
        (a_spec(ranks=8), a_pool(nodes=2)),
        (a_spec(), a_pool(selectors=["device.attributes['gpu.nvidia.com'].architecture == 'x'"])),
        (a_spec(sharing="time_slice"), a_pool(sharing="time_slice")),
        (a_spec(sharing="exclusive"), a_pool(sharing="mps", memory_bytes=2**34)),
        (a_spec(sharing="mps"), a_pool(sharing="mps", memory_bytes=2**34)),
        (
            a_spec(),
            a_pool(device_class="", alternatives=ALTERNATIVES),
        ),
        (a_spec("sampler"), a_pool(roles=["sampler"], devices=1)),
        (a_spec("sampler"), a_pool(roles=["sampler"], device_class="", devices=1)),
        (a_spec("sampler", sampler=SamplerSettings(ranks=2)), a_pool(roles=["sampler"])),
        (a_spec(worker_id="trainer-" + "Long_" * 30 + "-0", session_id="Ann " * 30), a_pool()),
    ],
    ids=lambda each: each.name if isinstance(each, ClaimPoolSettings) else each.worker_id[:20],
)


@EVERY_KIND
@pytest.mark.parametrize("placement", ["strict", "shared"])
def test_kubernetes_knows_every_field_of_every_object(spec, pool, placement):
    for each in all_of(rendered(spec, pool, placement=placement)):
        for version in VERSIONS:
            kubernetes_validate.validate(each, version, strict=True)


@EVERY_KIND
def test_a_pod_asks_for_claims_that_are_made_with_it(spec, pool):
    """Kubernetes would accept a missing or unnamed claim."""
    objects = rendered(spec, pool)
    made = [claim["metadata"]["name"] for claim in objects.claims]
    for pod in objects.pods:
        entries = {e["name"]: e["resourceClaimName"] for e in pod["spec"].get("resourceClaims", [])}
        named = [each["name"] for each in container(pod)["resources"].get("claims", [])]
        of_node = made[objects.pods.index(pod) :][:1]
        assert [entries[name] for name in named] == of_node
        assert len(entries) == len(named)
    assert len(made) == (len(objects.pods) if pool.has_claims else 0)


@EVERY_KIND
def test_a_claim_asks_for_the_devices_of_its_pool_and_never_for_none(spec, pool):
    """Kubernetes would schedule a pod with an empty claim without a device."""
    for claim in rendered(spec, pool).claims:
        assert set(claim["spec"]) == {"devices"}
        (request,) = claim["spec"]["devices"]["requests"]
        asked = request.get("firstAvailable", []) or [request["exactly"]]
        for each in asked:
            assert each["allocationMode"] == "ExactCount"
            assert each["count"] == pool.devices
            assert each["deviceClassName"]
        assert len({each.get("name") for each in asked}) == len(asked)


CONFIGURATIONS = json.loads((GOLDEN / "claim_sharing.json").read_text())
"""By pool and run: the configuration of the claim, null without one."""


def claim_of(pool: Sharing | None, run: Sharing, **changes: object) -> Object:
    there = a_pool(sharing=pool, memory_bytes=80 * 2**30, **changes)
    (claim,) = render_claims("train-0", pool=there, home=home(), sharing=run)
    return claim


def configured(claim: Object) -> Object | None:
    found = claim["spec"]["devices"].get("config", [None])
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("run", Sharing)
@pytest.mark.parametrize("pool", [None, *Sharing])
def test_the_configuration_of_a_claim_equals_the_sharing_of_its_workers(pool, run):
    """NVIDIA's driver refuses each configuration unless a feature gate is on. So a pool without
    `sharing` has none, and an exclusive run needs none."""
    claim = claim_of(pool, run)
    for version in VERSIONS:
        kubernetes_validate.validate(claim, version, strict=True)
    found = configured(claim)
    assert found == CONFIGURATIONS[pool or "none"][run]
    strategy = run.strategy(memory_bytes=80 * 2**30) if pool == run else None
    if strategy is None:
        assert found is None
    else:
        names = [each["name"] for each in claim["spec"]["devices"]["requests"]]
        assert found is not None and found["requests"] == names
        assert found["opaque"]["parameters"]["sharing"] == strategy
        GpuConfig.model_validate_json(json.dumps(found["opaque"]["parameters"]))


class Strict(BaseModel):
    """NVIDIA's driver refuses unknown fields."""

    model_config = ConfigDict(extra="forbid")


class TimeSlicingConfig(Strict):
    interval: Literal["Default", "Short", "Medium", "Long"]


class MpsConfig(Strict):
    defaultActiveThreadPercentage: int | None = Field(None, ge=0, le=100)
    defaultPinnedDeviceMemoryLimit: int = Field(ge=2**20, description="a quantity of bytes")


class GpuSharing(Strict):
    """The driver refuses the configuration of another strategy."""

    strategy: Literal["TimeSlicing", "MPS"]
    timeSlicingConfig: TimeSlicingConfig | None = None
    mpsConfig: MpsConfig | None = None

    @model_validator(mode="after")
    def _has_its_own(self) -> GpuSharing:
        slices, by_mps = self.timeSlicingConfig is not None, self.mpsConfig is not None
        assert (slices, by_mps) == (self.strategy == "TimeSlicing", self.strategy == "MPS")
        return self


class GpuConfig(Strict):
    """As `api/nvidia.com/resource/v1beta1` of NVIDIA's DRA driver declares it."""

    apiVersion: Literal["resource.nvidia.com/v1beta1"]
    kind: Literal["GpuConfig"]
    sharing: GpuSharing


@pytest.mark.parametrize("run", Sharing)
def test_claims_of_other_devices_than_gpus_have_no_configuration(run):
    changes = {"device_class": "cpu.example.com", "compute": "cpu"}
    for pool in (Sharing.EXCLUSIVE, Sharing.TIME_SLICE):
        assert configured(claim_of(pool, run, **changes)) is None


@pytest.mark.parametrize(
    "changes", [{}, {"memory_bytes": 1, "compute": "cpu"}, {"memory_bytes": 1, "device_class": ""}]
)
def test_a_pool_shared_by_mps_has_gpus_of_known_memory(changes):
    with pytest.raises(ValidationError, match="'train' shares devices by mps, so it needs claims"):
        a_pool(sharing="mps", **changes)


def test_a_claim_says_when_it_is_another_one_than_its_pool_asks_for_now():
    def digest(pool: ClaimPoolSettings) -> str:
        sharing = pool.sharing or Sharing.TIME_SLICE
        (claim,) = render_claims("train-0", pool=pool, home=home(), sharing=sharing)
        return claim["metadata"]["annotations"][GROUP_SPEC]

    assert digest(a_pool()) == digest(a_pool(idle=5, workers=2))
    others = (digest(a_pool(devices=2)), digest(a_pool(selectors=["true"])))
    assert len({digest(a_pool()), *others}) == 3
    assert digest(a_pool(sharing="exclusive")) == digest(a_pool()) != digest(SLICED)


@EVERY_KIND
def test_the_secret_is_in_the_secret_alone(spec, pool):
    objects = rendered(spec, pool)
    told = json.loads(base64.b64decode(objects.secret["data"]["spec.json"]))
    assert WorkerSpec.model_validate(told) == spec
    rest = [each for each in all_of(objects) if each is not objects.secret]
    assert spec.secret not in json.dumps(rest)


@EVERY_KIND
def test_a_pod_may_do_nothing_but_its_work(spec, pool):
    for pod in rendered(spec, pool).pods:
        about, worker = pod["spec"], container(pod)
        assert about["automountServiceAccountToken"] is False
        assert about["securityContext"]["runAsNonRoot"]
        assert about["securityContext"]["runAsUser"] > 0
        assert about["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert worker["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        assert about["restartPolicy"] == "Never"
        secret = next(each["secret"] for each in about["volumes"] if "secret" in each)
        assert not secret["defaultMode"] & 0o337  # readable by its owner and its group


@EVERY_KIND
def test_everything_that_is_mounted_is_there(spec, pool):
    for pod in rendered(spec, pool).pods:
        volumes = [each["name"] for each in pod["spec"]["volumes"]]
        mounts = container(pod)["volumeMounts"]
        assert len(set(volumes)) == len(volumes)
        assert {each["name"] for each in mounts} == set(volumes)
        assert container(pod)["args"][1].startswith(
            next(m["mountPath"] for m in mounts if m["name"] == "tandem-spec")
        )
        assert container(pod)["terminationMessagePath"] == container(pod)["args"][3]


def test_a_worker_has_of_the_volume_what_it_needs_and_no_keys():
    def mounted(kind: str, **settings: object) -> dict[str, object]:
        pool = a_pool(roles=["trainer", "sampler"])
        (pod,) = rendered(a_spec(kind), pool, **settings).pods
        of_volume = [m for m in container(pod)["volumeMounts"] if m["name"] == "tandem-data"]
        for each in of_volume:
            assert each["mountPath"] == str(Path("/data", each.get("subPath", "")))
        return {each["mountPath"]: each.get("readOnly", False) for each in of_volume}

    assert mounted("sampler") == {"/data/models": True, "/data/weights": True}
    assert mounted("trainer") == {
        "/data/models": True,
        "/data/weights": False,
        "/data/checkpoints": False,
        "/data/snapshots": False,
        "/data/spill": False,
    }
    assert mounted("trainer", keep_compiled=True)["/data/compiled"] is False
    assert mounted("sampler", keep_compiled=True)["/data/compiled"] is False
    assert "/data/compiled" not in mounted("sampler") | mounted("trainer")


@pytest.mark.parametrize("kind", ["trainer", "sampler"])
def test_a_worker_may_keep_in_the_volume_the_code_that_it_compiles(kind: str):
    def caches(**settings: object) -> dict[str, str]:
        pool = a_pool(roles=["trainer", "sampler"])
        (pod,) = rendered(a_spec(kind), pool, **settings).pods
        return {e["name"]: e["value"] for e in container(pod)["env"] if "CACHE" in e["name"]}

    assert caches() == {}
    assert caches(keep_compiled=True) == {
        "TORCHINDUCTOR_CACHE_DIR": "/data/compiled",
        "VLLM_CACHE_ROOT": "/data/compiled/vllm",
    }


def test_the_memory_is_a_limit_and_has_what_is_written_to_shared_memory():
    (pod,) = rendered(a_spec(), a_pool()).pods
    resources = container(pod)["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"] == str(2**33)
    assert "cpu" not in resources["limits"]
    shared = next(e["emptyDir"] for e in pod["spec"]["volumes"] if e["name"] == "tandem-shm")
    assert shared == {"medium": "Memory", "sizeLimit": str(2**28)}


def test_ranks_of_several_nodes_have_a_pod_and_a_claim_on_each_and_a_name_to_meet():
    objects = rendered(a_spec(ranks=8), a_pool(nodes=3))
    assert [each["metadata"]["name"] for each in objects.pods] == [
        "trainer-s-ab12-0",
        "trainer-s-ab12-0-1",
    ]
    assert [each["metadata"]["name"] for each in objects.claims] == [
        "tandem-train-0-0",
        "tandem-train-0-1",
    ]
    assert objects.service is not None
    selector = objects.service["spec"]["selector"].items()
    first, second = objects.pods
    assert selector <= first["metadata"]["labels"].items()
    assert not selector <= second["metadata"]["labels"].items()
    environments = [{e["name"]: e["value"] for e in container(pod)["env"]} for pod in objects.pods]
    assert [each.get("TANDEM_NODE_RANK") for each in environments] == [None, "1"]
    assert [container(pod)["command"][2] for pod in objects.pods] == [
        "trainer_service",
        "trainer_service.node",
    ]


def test_a_worker_is_told_where_to_listen_and_where_its_ranks_meet():
    tls = Certificate(certificate="c", key="k", authority="a")
    pool = a_pool(nodes=2)
    spec = spec_of_pod(a_spec(ranks=8), pool=pool, home=home(), tls=tls)
    objects = rendered(spec, pool)
    ports = {e["name"]: e["containerPort"] for e in container(objects.pods[0])["ports"]}
    assert (spec.port, spec.metrics_port) == (ports["grpc"], ports["metrics"])
    assert objects.service is not None
    name, _, port = spec.rendezvous.partition(":")
    assert name == f"{objects.service['metadata']['name']}.research.svc"
    assert int(port) == objects.service["spec"]["ports"][0]["port"]
    assert (spec.nodes, spec.lifeline, spec.tls) == (2, LIFELINE, tls)
    WorkerSpec.model_validate_json(spec.model_dump_json())


def test_a_worker_without_devices_computes_with_the_cores_that_it_requests():
    """It would see all cores of its node."""
    tls = Certificate(certificate="c", key="k", authority="a")
    spec = spec_of_pod(a_spec(), pool=CPUS, home=home(cpus=2.5), tls=tls)
    assert spec.trainer is not None
    assert spec.trainer.threads == 2
    assert spec.rendezvous == ""


def test_objects_belong_to_the_deployment_and_say_whose_they_are():
    for each in all_of(rendered(a_spec(ranks=8), a_pool(nodes=2), instance="mine")):
        metadata = each["metadata"]
        assert metadata["namespace"] == "research"
        assert metadata["labels"]["tandem.dev/instance"] == "mine"
        assert metadata["labels"]["tandem.dev/group"] == "train-0"
        assert metadata["annotations"]["tandem.dev/epoch"] == "7"
        (owner,) = metadata["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("Deployment", "mine", "7c4f")
        worker = each["kind"] != "ResourceClaim"
        assert ("tandem.dev/worker" in metadata["labels"]) is worker  # claims outlive workers


@EVERY_KIND
def test_each_object_of_a_worker_has_all_labels_by_which_it_is_found(spec, pool):
    objects = rendered(spec, pool, instance="mine")
    of_worker = {
        "app.kubernetes.io/part-of": "tandem",
        "app.kubernetes.io/component": spec.kind,
        "tandem.dev/instance": "mine",
        "tandem.dev/worker": label_value(spec.worker_id),
        "tandem.dev/session": label_value(spec.session_id),
        "tandem.dev/group": "train-0",
        "tandem.dev/framework": "fsdp2" if spec.kind == "trainer" else "vllm",
    }
    for number, pod in enumerate(objects.pods):
        of_pod = {"tandem.dev/node": str(number)}
        assert pod["metadata"]["labels"] == of_worker | of_pod
    for each in all_of(objects):
        if each["kind"] not in ("Pod", "ResourceClaim"):
            assert each["metadata"]["labels"] == of_worker
    for each in (objects.secret, *objects.pods):
        assert each["metadata"]["annotations"]["tandem.dev/session-id"] == spec.session_id


def test_two_installations_of_a_namespace_have_claims_of_their_own():
    names = {
        claim["metadata"]["name"]
        for name in ("mine", "yours")
        for claim in render_claims(
            "train-0", pool=a_pool(), home=home(instance=name), sharing=Sharing.TIME_SLICE
        )
    }
    assert len(names) == 2


@pytest.mark.parametrize(
    "worker_id",
    [
        "trainer-s-ab12-0",
        "Trainer-s-ab12-0",
        "trainer-s_ab12-0",
        "9",
        "-",
        "ü",
        "x" * 300,
        "a-",
    ],
)
def test_any_id_has_a_name_and_a_label(worker_id):
    name, label = pod_name(worker_id, 63), label_value(worker_id)
    metadata = {"name": name, "labels": {"tandem.dev/worker": label}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
    assert len(name) <= 63
    assert len(label) <= 63
    assert name.strip("-") == name == name.lower()
    assert label[0].isalnum()
    assert label[-1].isalnum()
    assert name.isascii()
    assert label.isascii()
    kubernetes_validate.validate(pod, "1.37", strict=True)


def test_ids_that_are_shortened_stay_different():
    ids = ["x" * 300, "x" * 301, "a_b", "a-b", "A-b"]
    assert len({object_name(each) for each in ids}) == len(ids)
    assert len({label_value(each) for each in ids}) == len(ids)
    assert object_name("trainer-s-ab12-0") == label_value("trainer-s-ab12-0") == "trainer-s-ab12-0"


def test_in_shared_placement_no_role_has_nodes_of_its_own():
    strict = rendered(a_spec(), a_pool(), placement="strict").pods[0]["spec"]
    shared = rendered(a_spec(), a_pool(), placement="shared").pods[0]["spec"]
    assert strict["nodeSelector"] == {"tandem.dev/role": "trainer"}
    assert shared["nodeSelector"] == {}


def test_the_volume_is_the_claim_of_the_settings_unless_templates_have_it():
    (pod,) = rendered(a_spec(), a_pool(), volume_claim="nfs").pods
    (volume,) = [e for e in pod["spec"]["volumes"] if "persistentVolumeClaim" in e]
    assert volume["persistentVolumeClaim"] == {"claimName": "nfs"}
    (pod,) = rendered(a_spec(), a_pool(), volume_claim="").pods
    assert not [e for e in pod["spec"]["volumes"] if "persistentVolumeClaim" in e]
