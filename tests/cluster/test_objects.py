"""The manifests and rights on a real API server. No pod runs, so no node is needed."""

from __future__ import annotations

import uuid

import pytest

from gateway.admin.doctor.cluster import RIGHTS
from tests.cluster import settings
from tests.cluster.artefacts import keep
from tests.cluster.kubectl import Kubectl
from tests.cluster.overlay import write_overlay

pytestmark = pytest.mark.skipif(not settings.KUBECONFIG, reason="KUBECONFIG names no cluster")


@pytest.fixture(scope="module")
def applied(tmp_path_factory):
    kubectl = Kubectl(f"tandem-test-{uuid.uuid4().hex[:8]}")
    overlay = write_overlay(tmp_path_factory.mktemp("overlay"), kubectl.namespace)
    try:
        kubectl("apply", "--server-side", "--kustomize", str(overlay))
        yield kubectl
    finally:
        if settings.ARTEFACTS:
            keep(kubectl, settings.ARTEFACTS / kubectl.namespace)
        kubectl.run("delete", "namespace", kubectl.namespace, "--wait=false")


def test_the_api_server_takes_the_objects_of_the_overlay(applied):
    assert applied.names("deployments") == ["deployment.apps/tandem"]
    assert applied.names("statefulsets") == ["statefulset.apps/tandem-database"]
    assert applied.names("networkpolicies") and applied.names("persistentvolumeclaims")


def test_the_gateways_account_has_the_rights_that_the_doctor_checks_and_no_others(applied):
    account = f"system:serviceaccount:{applied.namespace}:tandem-gateway"

    def may(verb: str, group: str, resource: str) -> bool:
        kind, _, part = resource.partition("/")
        what = f"{kind}.{group}" if group else kind
        what += "/tandem" if kind == "deployments" else ""  # only its own
        sub = (f"--subresource={part}",) if part else ()
        done = applied.run("auth", "can-i", verb, what, *sub, "--as", account)
        assert done.stdout.strip() in (b"yes", b"no"), done.stderr
        return done.stdout.strip() == b"yes"

    for (group, resource), verbs in RIGHTS.items():
        assert all(may(verb, group, resource) for verb in verbs), (resource, verbs)
    assert not may("get", "", "secrets")
    assert not may("delete", "apps", "deployments")


def test_the_accounts_of_workers_have_no_rights(applied):
    for name in ("tandem-trainer", "tandem-sampler", "tandem-models"):
        account = f"system:serviceaccount:{applied.namespace}:{name}"
        done = applied.run("auth", "can-i", "list", "pods", "--as", account)
        assert done.stdout.strip() == b"no", name
