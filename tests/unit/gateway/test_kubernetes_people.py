"""The rights of people at the API server: `k8s/components/people`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import yaml
from kubernetes.aio.client import ApiClient, AuthorizationV1Api, Configuration

from gateway.admin.doctor.cluster import RIGHTS
from tests.support.kubernetes.access import GROUP, AuthorizingServer, is_allowed
from tests.support.kubernetes.manifests import K8S
from tests.support.kubernetes.server import Session
from tests.support.virtual_time import run_in_virtual_time

PEOPLE = ("administrator", "maintainer", "ci")
NAMESPACE, ELSEWHERE, CLUSTER = "tandem", "another", ""
GOLDEN = """
administrator maintainer ci | what
yes           yes        yes| get pods
yes           yes        yes| list deployments.apps
yes           yes        yes| watch deployments.apps
yes           yes        -  | get pods/log
yes           yes        -  | delete pods
yes           yes        -  | list events
yes           yes        -  | list services
yes           yes        -  | list statefulsets.apps
yes           yes        -  | list jobs.batch
yes           yes        -  | list resourceclaims.resource.k8s.io
yes           yes        -  | list persistentvolumeclaims
yes           -          -  | create pods
yes           -          -  | patch pods
yes           -          -  | create pods/exec
yes           -          -  | create pods/portforward
yes           -          -  | get secrets
yes           -          -  | list secrets
yes           -          -  | create secrets
yes           -          -  | get configmaps
yes           -          -  | patch deployments.apps
yes           -          -  | delete deployments.apps
yes           -          -  | create jobs.batch
yes           -          -  | delete resourceclaims.resource.k8s.io
yes           -          -  | delete persistentvolumeclaims
yes           -          -  | patch networkpolicies.networking.k8s.io
yes           -          -  | create roles.rbac.authorization.k8s.io
yes           -          -  | create rolebindings.rbac.authorization.k8s.io
-             -          -  | escalate roles.rbac.authorization.k8s.io
-             -          -  | bind clusterroles.rbac.authorization.k8s.io
-             -          -  | create pods/attach
-             -          -  | create pods/ephemeralcontainers
-             -          -  | create serviceaccounts/token
-             -          -  | impersonate serviceaccounts
"""
GOLDEN_OF_CLUSTER = """
administrator maintainer ci | what
yes           yes        -  | list nodes
yes           yes        -  | list resourceslices.resource.k8s.io
yes           yes        -  | list deviceclasses.resource.k8s.io
-             -          -  | patch nodes
-             -          -  | delete nodes
-             -          -  | create nodes/proxy
-             -          -  | get secrets
-             -          -  | list pods
-             -          -  | list namespaces
-             -          -  | delete namespaces
-             -          -  | list persistentvolumes
-             -          -  | create clusterroles.rbac.authorization.k8s.io
-             -          -  | create clusterrolebindings.rbac.authorization.k8s.io
"""


def documents(*parts: str) -> list[dict]:
    return list(yaml.safe_load_all((K8S.joinpath(*parts)).read_text()))


def binding(kind: str, role: str, group: str, namespace: str = "") -> dict:
    return {
        "kind": kind,
        "metadata": {"name": f"{role}-of-{group}", "namespace": namespace},
        "roleRef": {"apiGroup": GROUP, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": GROUP, "kind": "Group", "name": group}],
    }


def rbac() -> list[dict]:
    """The component's roles, bound as the docs say, and the gateway's own."""
    of_gateway = documents("base", "rbac.yaml")
    for one in of_gateway:
        one["metadata"]["namespace"] = NAMESPACE  # as kustomize sets it
    return [
        *documents("components", "people", "cluster-roles.yaml"),
        *of_gateway,
        *(binding("RoleBinding", f"tandem-{each}", each, NAMESPACE) for each in PEOPLE),
        binding("ClusterRoleBinding", "tandem-nodes", "administrator"),
        binding("ClusterRoleBinding", "tandem-nodes", "maintainer"),
    ]


def attributes(what: str, namespace: str) -> dict[str, str]:
    """Read "list deployments.apps" and "get pods/log"."""
    verb, _, resource = what.partition(" ")
    resource, _, group = resource.partition(".")
    resource, _, subresource = resource.partition("/")
    found = {"verb": verb, "group": group, "resource": resource, "subresource": subresource}
    return {key: value for key, value in (found | {"namespace": namespace}).items() if value}


async def can_i(questions: Iterable[tuple[str, str, str]]) -> list[bool]:
    """Ask for each (group, what, namespace), as `kubectl auth can-i` does."""
    client = ApiClient(Configuration(host="http://cluster"))
    client.rest_client.pool_manager = Session(AuthorizingServer(rbac()))
    api, answers = AuthorizationV1Api(client), []
    for group, what, namespace in questions:
        spec = {"user": "somebody", "groups": [group, "system:authenticated"]}
        spec["resourceAttributes"] = attributes(what, namespace)
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}
        answer = await api.create_subject_access_review(review | {"spec": spec})
        answers.append(answer.status.allowed)
    return answers


def table(rows: Iterable[str], namespace: str) -> str:
    whats = [row.partition("| ")[2] for row in rows]
    questions = [(group, what, namespace) for what in whats for group in PEOPLE]
    answers = iter(run_in_virtual_time(can_i(questions)))
    lines = ["administrator maintainer ci | what"]
    for what in whats:
        cells = ["yes" if next(answers) else "-" for _ in PEOPLE]
        lines.append(f"{cells[0]:14}{cells[1]:11}{cells[2]:3}| {what}")
    return "\n" + "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("golden", "namespace"), [(GOLDEN, NAMESPACE), (GOLDEN_OF_CLUSTER, CLUSTER)]
)
def test_each_person_has_the_rights_of_the_table(golden, namespace):
    assert table(golden.strip().splitlines()[1:], namespace) == golden


def test_nobody_has_rights_in_another_namespace():
    whats = [line.partition("| ")[2] for line in GOLDEN.strip().splitlines()[1:]]
    questions = [(group, what, ELSEWHERE) for what in whats for group in PEOPLE]
    assert not any(run_in_virtual_time(can_i(questions)))


def test_a_stranger_has_no_rights():
    questions = [("strangers", what, NAMESPACE) for what in ("get pods", "list nodes")]
    assert run_in_virtual_time(can_i(questions)) == [False, False]


def test_each_role_includes_the_next_so_that_an_administrator_can_give_it():
    rights = {
        role: {
            (verb, group, resource)
            for rule in one["rules"]
            for verb in rule["verbs"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
        }
        for one in rbac()
        if (role := one["metadata"]["name"]) and one["kind"] in ("ClusterRole", "Role")
    }
    assert rights["tandem-administrator"] > rights["tandem-maintainer"] > rights["tandem-ci"]
    assert rights["tandem-administrator"] > rights["tandem-gateway"], "else it could not install"
    assert not any("*" in right for each in rights.values() for right in each)


def installed() -> Iterator[tuple[str, str]]:
    """The (group, resource) of each object of `k8s/` in Tandem's namespace."""
    of_cluster = {"ClusterRole", "Namespace", "PersistentVolume", "PriorityClass"}
    of_kustomize = {"Component", "Kustomization"}
    for file in K8S.rglob("*.yaml"):
        for one in yaml.safe_load_all(file.read_text()):
            group, _, version = one.get("apiVersion", "").rpartition("/")
            kind = one.get("kind", "")
            if version and kind not in of_cluster | of_kustomize:
                plural = kind.lower().removesuffix("y") + "ies" if kind[-1] == "y" else kind.lower()
                plural += "" if kind[-1] == "y" else "es" if kind[-1] == "s" else "s"
                yield group, plural


def test_an_administrator_installs_and_removes_every_object_of_the_namespace():
    found = sorted(set(installed()))
    assert ("apps", "deployments") in found and ("networking.k8s.io", "networkpolicies") in found
    for group, resource in found:
        for verb in ("create", "patch", "delete"):
            asked = {"verb": verb, "group": group, "resource": resource, "namespace": NAMESPACE}
            spec = {"groups": ["administrator"], "resourceAttributes": asked}
            assert is_allowed(rbac(), spec), (verb, group, resource)


def test_the_gateways_account_has_the_rights_that_the_doctor_asks_for():
    user = f"system:serviceaccount:{NAMESPACE}:tandem-gateway"
    for (group, path), verbs in RIGHTS.items():
        resource, _, subresource = path.partition("/")
        asked = {"group": group, "resource": resource, "subresource": subresource}
        asked |= {"namespace": NAMESPACE, "name": "tandem" if group == "apps" else ""}
        for verb in verbs:
            spec = {"user": user, "resourceAttributes": asked | {"verb": verb}}
            assert is_allowed(rbac(), spec), (verb, group, path)
    asked = {"verb": "get", "group": "apps", "resource": "deployments", "namespace": NAMESPACE}
    named = {"user": user, "resourceAttributes": asked | {"name": "another"}}
    assert not is_allowed(rbac(), named), "it may read its own Deployment only"
