"""`tandem doctor --cluster` on clusters, and `--volume` on volumes."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterable

import kubernetes.config
import pytest
import yaml

from gateway.admin.doctor.check import Check
from gateway.admin.doctor.cluster import (
    RIGHTS,
    ClusterChecks,
    Unreadable,
    api_server,
    read_settings,
)
from gateway.admin.doctor.volume import check_volume
from tandem.errors import InvalidRequest
from tests.support.kubernetes.manifests import K8S

IN = "/namespaces/rl"
NODES = "/api/v1/nodes"
CLASSES, SLICES = (
    f"/apis/resource.k8s.io/v1/{each}" for each in ("deviceclasses", "resourceslices")
)
CLAIM = f"/api/v1{IN}/persistentvolumeclaims/tandem-data"
DEPLOYMENT = f"/apis/apps/v1{IN}/deployments/tandem"
CONFIG = f"/api/v1{IN}/configmaps/tandem-settings-1"
PODS = f"/api/v1{IN}/pods?labelSelector=tandem.dev/serving%3Dtandem"
ACCOUNTS = [f"/api/v1{IN}/serviceaccounts/tandem-{role}" for role in ("trainer", "sampler")]
POLICIES = f"/apis/networking.k8s.io/v1{IN}/networkpolicies"
POOLS = [{"name": "train", "roles": ["trainer"], "claims": 2, "device_class": "gpu", "devices": 4}]


def named(name: str, **labels: str) -> dict:
    return {"metadata": {"name": name, "labels": labels}}


def a_slice(node: str, count: int) -> dict:
    device = {"capacity": {"memory": {"value": "80Gi"}}}
    return {"spec": {"driver": "gpu.test", "nodeName": node, "devices": [device] * count}}


HEALTHY = {
    "/version": {"major": "1", "minor": "36+"},
    "/apis/resource.k8s.io/v1": {"resources": []},
    CLASSES: {"items": [named("gpu")]},
    SLICES: {"items": [a_slice("a", 4), a_slice("b", 4)]},
    NODES: {
        "items": [named("a", **{"tandem.dev/role": "trainer"}), named("b")],
    },
    "/api/v1/namespaces/rl": named("rl", **{"pod-security.kubernetes.io/enforce": "restricted"}),
    CLAIM: {
        "spec": {"accessModes": ["ReadWriteMany"], "storageClassName": "nfs"},
        "status": {"phase": "Bound"},
    },
    DEPLOYMENT: {
        "metadata": {"name": "tandem"},
        "spec": {
            "replicas": 2,
            "template": {
                "spec": {
                    "serviceAccountName": "tandem-gateway",
                    "containers": [
                        {
                            "image": "registry.test:5000/g:1",
                            "envFrom": [{"configMapRef": {"name": "tandem-settings-1"}}],
                        }
                    ],
                }
            },
        },
        "status": {"readyReplicas": 2},
    },
    CONFIG: {
        "data": {
            "TANDEM_CLAIM_POOLS": json.dumps(POOLS),
            "TANDEM_KUBERNETES_TRAINER_IMAGE": "t:1",
            "TANDEM_KUBERNETES_SAMPLER_IMAGE": "s:1",
        }
    },
    PODS: {"items": [named("tandem-1")]},
    **{account: named(account.rpartition("/")[2]) for account in ACCOUNTS},
    POLICIES: {"items": [named("default-deny")]},
}


def examine(*, without: str = "", refused: tuple = (), **changes: object) -> dict[str, Check]:
    """Examine a healthy cluster with changed or missing answers, or refused rights."""
    answers = copy.deepcopy(HEALTHY) | changes
    answers.pop(without, None)

    def ask(path: str, body: dict | None = None) -> dict | None:
        if body is not None:
            asked = body["spec"]["resourceAttributes"]
            resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
            assert body["spec"]["user"] == "system:serviceaccount:rl:tandem-gateway"
            return {"status": {"allowed": (asked["verb"], resource) not in refused}}
        answer = answers.get(path)
        if isinstance(answer, Exception):
            raise answer
        return answer

    cluster = ClusterChecks(ask, namespace="rl", instance="tandem")
    return {each.name: each for each in cluster.run()}


def problems(found: dict[str, Check]) -> list[str]:
    return [name for name, each in found.items() if each.level == "problem"]


def settings(**changes: str) -> dict[str, object]:
    return {CONFIG: {"data": HEALTHY[CONFIG]["data"] | changes}}


def test_a_cluster_with_all_that_is_needed_has_no_problem():
    found = examine()
    assert problems(found) == []
    assert found["driver gpu.test"].value == "a: 4, b: 4"
    assert "80Gi" in found["driver gpu.test"].about
    assert found["pool train"].value == "2 × 4 devices"
    assert found["gateway"].value == "2 of 2 ready, 1 serving"


CASES = {
    "an old version": (
        {"/version": {"major": "1", "minor": "33"}},
        "Kubernetes",
        "upgrade to 1.34 or later",
    ),
    "no class": (
        {CLASSES: {"items": [named("mig")]}},
        "DeviceClass gpu",
        "there are mig: install the driver, or correct the pool",
    ),
    "no devices": ({SLICES: {"items": []}}, "ResourceSlices", "no driver publishes devices"),
    "small nodes": (
        {SLICES: {"items": [a_slice("a", 2)]}},
        "pool train",
        "no node has 4 devices, at most 2",
    ),
    "no label": (
        {NODES: {"items": [named("a")]}},
        "nodes for trainers",
        "kubectl label node NODE tandem.dev/role=trainer",
    ),
    "a volume of one node": (
        {CLAIM: HEALTHY[CLAIM] | {"spec": {"accessModes": ["ReadWriteOnce"]}}},
        "volume tandem-data",
        "take a class, or an export, for ReadWriteMany",
    ),
    "a volume that is lost": (
        {CLAIM: HEALTHY[CLAIM] | {"status": {"phase": "Lost"}}},
        "volume tandem-data",
        "kubectl --namespace rl describe pvc tandem-data says why",
    ),
    "no gateway that serves": ({PODS: {"items": []}}, "gateway", "logs deployment/tandem"),
    "no pools": (settings(TANDEM_CLAIM_POOLS="[]"), "pools", "name a pool"),
    "no image": (
        settings(TANDEM_KUBERNETES_TRAINER_IMAGE=""),
        "image of trainers",
        "set TANDEM_KUBERNETES_TRAINER_IMAGE",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_problem_is_named_with_what_to_do(case):
    changes, name, about = CASES[case]
    found = examine(**changes)
    assert name in problems(found)
    assert about in found[name].about


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/apis/resource.k8s.io/v1", "resource.k8s.io/v1"),
        (CLAIM, "volume tandem-data"),
        (ACCOUNTS[0], "account of trainers"),
    ],
)
def test_what_is_not_there_is_a_problem(path, name):
    assert name in problems(examine(without=path))


def test_a_cluster_without_devices_serves_pools_without_claims():
    pools = json.dumps([{"name": "cpu", "roles": ["trainer"]}])
    found = examine(without=SLICES, **settings(TANDEM_CLAIM_POOLS=pools))
    assert problems(found) == []
    assert found["ResourceSlices"].level == "absent"
    found = examine(without="/apis/resource.k8s.io/v1", **settings(TANDEM_CLAIM_POOLS=pools))
    assert problems(found) == ["resource.k8s.io/v1"]  # the gateway always watches it


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("TANDEM_CLAIM_POOLS", "[", " is '[': Invalid JSON"),
        ("TANDEM_CLAIM_POOLS", '[{"name": "a"}]', "_0_ROLES: Field required"),
        ("TANDEM_KUBERNETES_PLACEMENT", "far", " is 'far': Input"),
    ],
)
def test_settings_that_are_refused_are_named(name, value, told):
    with pytest.raises(InvalidRequest) as refused:
        examine(**{CONFIG: {"data": {name: value}}})
    assert refused.value.message.startswith(name + told)
    assert "pydantic" not in refused.value.message


def test_one_node_needs_no_volume_for_many():
    found = examine(
        **{
            NODES: {"items": [named("a", **{"tandem.dev/role": "trainer"})]},
            CLAIM: HEALTHY[CLAIM] | {"spec": {"accessModes": ["ReadWriteOnce"]}},
        }
    )
    assert problems(found) == []


@pytest.mark.parametrize(
    ("image", "told"),
    [
        ("registry.test:5000/t:2", True),
        ("t:1@sha256:00", False),
        ("registry.test:5000/t@sha256:00", False),  # a digest hides its version
    ],
)
def test_an_image_of_another_tag_than_the_gateways_is_told_and_no_problem(image, told):
    found = examine(**settings(TANDEM_KUBERNETES_TRAINER_IMAGE=image))
    assert problems(found) == []
    assert found["image of trainers"].value == image
    assert ("the gateway's has the tag 1" in found["image of trainers"].about) is told


def test_rights_that_are_missing_are_named():
    found = examine(refused=(("get", "pods/log"), ("create", "resourceclaims")))
    assert problems(found) == ["rights of tandem-gateway"]
    assert "get pods/log, create resourceclaims" in found["rights of tandem-gateway"].about


def test_the_policy_of_a_trainer_on_several_nodes_does_not_stand_for_those_of_the_namespace():
    own = named("trainer-s-1-0", **{"tandem.dev/worker": "trainer-s-1-0"})
    for policies, count, level in (([own], "0", "absent"), ([own, named("deny")], "1", "ok")):
        check = examine(**{POLICIES: {"items": policies}})["network policies"]
        assert (check.value, check.level) == (count, level)


def test_the_settings_of_a_deployment_are_not_filled_from_the_environment(monkeypatch):
    monkeypatch.setenv("TANDEM_KUBERNETES_PLACEMENT", "shared")
    assert "nodes for trainers" in examine()


def test_before_there_is_a_gateway_its_settings_are_those_of_the_environment(monkeypatch):
    monkeypatch.setenv("TANDEM_CLAIM_POOLS", json.dumps(POOLS))
    found = examine(without=DEPLOYMENT)
    assert found["settings"].value == "of the environment"
    assert found["gateway"].level == "absent"
    assert found["pool train"].level == "ok"


def test_before_the_first_apply_nothing_that_it_makes_is_missed(tmp_path):
    file = tmp_path / "settings.env"
    lines = [f"{name}={value}" for name, value in HEALTHY[CONFIG]["data"].items()]
    file.write_text("\n".join(["# of an overlay", *lines, ""]))
    only = ("/version", "/apis/resource.k8s.io/v1", CLASSES, SLICES, NODES)
    cluster = ClusterChecks(
        {path: HEALTHY[path] for path in only}.get,
        namespace="rl",
        instance="tandem",
        file=read_settings(file),
    )
    found = {each.name: each for each in cluster.run()}
    assert problems(found) == []
    assert found["pool train"].value == "2 × 4 devices"
    assert found["namespace rl"].level == found["gateway"].level == "absent"


def test_settings_that_are_no_text_are_refused_in_a_sentence(tmp_path):
    (file := tmp_path / "settings.env").write_bytes(b"TANDEM_PORT=\xff")
    with pytest.raises(InvalidRequest, match="the settings cannot be read"):
        read_settings(file)


def test_without_a_way_to_a_cluster_nothing_else_is_answered(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kubernetes.config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(InvalidRequest, match="there is no way to a cluster"):
        api_server()
    assert capsys.readouterr().out == ""  # the answer goes there


def test_what_the_administrator_may_not_read_is_not_known_and_no_problem():
    found = examine(**{NODES: Unreadable("nodes is forbidden")})
    assert problems(found) == []
    assert "nodes is forbidden" in found["nodes"].about


def test_the_rights_that_are_asked_for_are_those_of_the_role():
    objects = yaml.safe_load_all((K8S / "base" / "rbac.yaml").read_text())
    (role,) = (one for one in objects if one["kind"] == "Role")
    had = {
        (group, resource): tuple(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert had == RIGHTS


# --- Volumes ------------------------------------------------------------------------------------


def levels(found: Iterable[Check]) -> dict[str, str]:
    return {each.name: each.level for each in found}


def test_a_volume_that_can_be_written_and_renamed_on_is_fine_and_nothing_is_left_on_it(tmp_path):
    found = levels(check_volume(tmp_path, name="one"))
    assert found == {"volume": "ok", "locks": "ok", "rename": "ok"}
    assert list(tmp_path.iterdir()) == []


def test_peers_see_each_others_files_and_leave_nothing(tmp_path):
    found: dict[str, dict[str, str]] = {}

    def examine(name: str) -> None:
        found[name] = levels(check_volume(tmp_path, name=name, peers=2, patience=60))

    threads = [threading.Thread(target=examine, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found.keys() == {"one", "two"}
    assert {each["peers"] for each in found.values()} == {"ok"}
    assert list(tmp_path.iterdir()) == []


def test_a_peer_that_is_never_seen_is_a_problem(tmp_path):
    found = levels(check_volume(tmp_path, name="one", peers=2, patience=0))
    assert found["peers"] == "problem"


def test_a_folder_that_is_not_there_is_a_problem(tmp_path):
    (found,) = check_volume(tmp_path / "none", name="one")
    assert found.level == "problem"
    assert "No such file" in found.about
