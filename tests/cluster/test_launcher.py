"""The launcher of pods on a real cluster, with idle workers.

Each test makes a namespace and deletes it at the end."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import asynccontextmanager

import pytest

from tests.cluster.artefacts import keep
from tests.cluster.kubectl import Kubectl
from tests.cluster.settings import ARTEFACTS, DEVICE_CLASS, IMAGE, KUBECONFIG, NO_NODES
from tests.support.kubernetes.body import BODY
from tests.support.kubernetes.gateway import Gateway

kubernetes = pytest.importorskip("kubernetes.aio")
LABEL = "tandem.dev/instance"

_MISSING = NO_NODES or ("" if DEVICE_CLASS else "TANDEM_TEST_DEVICE_CLASS is empty")
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=_MISSING)


class RealStage:
    """Implements `body.Stage`."""

    def __init__(self, client, namespace: str) -> None:
        self._namespace = namespace
        self._core = kubernetes.client.CoreV1Api(client)
        self._networks = kubernetes.client.NetworkingV1Api(client)
        self._claims = kubernetes.client.ResourceV1Api(client)

    def gateway(self, **about) -> Gateway:
        made = Gateway(connect, namespace=self._namespace, **about)
        made.maker.image, made.maker.device_class = IMAGE, DEVICE_CLASS
        return made

    async def left(self) -> dict[str, list[str]]:
        lists = {
            "pods": self._core.list_namespaced_pod,
            "secrets": self._core.list_namespaced_secret,
            "services": self._core.list_namespaced_service,
            "networkpolicies": self._networks.list_namespaced_network_policy,
            "resourceclaims": self._claims.list_namespaced_resource_claim,
        }
        found = {
            kind: (await each(self._namespace, label_selector=LABEL)).items
            for kind, each in lists.items()
        }
        return {k: sorted(each.metadata.name for each in v) for k, v in found.items() if v}

    async def delete_pod(self, name: str) -> None:
        await self._core.delete_namespaced_pod(name, self._namespace)


async def connect():
    configuration = kubernetes.client.Configuration()
    await kubernetes.config.load_kube_config(
        config_file=KUBECONFIG, client_configuration=configuration
    )
    return kubernetes.client.ApiClient(configuration)


@asynccontextmanager
async def stage_in_namespace_of_its_own():
    async with await connect() as client:
        core, apps = kubernetes.client.CoreV1Api(client), kubernetes.client.AppsV1Api(client)
        namespace = f"tandem-test-{uuid.uuid4().hex[:8]}"
        await core.create_namespace({"metadata": {"name": namespace}})
        try:
            labels = {"app": "tandem"}
            await apps.create_namespaced_deployment(
                namespace,
                {
                    "metadata": {"name": "tandem"},
                    "spec": {
                        "replicas": 0,
                        "selector": {"matchLabels": labels},
                        "template": {
                            "metadata": {"labels": labels},
                            "spec": {"containers": [{"name": "gateway", "image": IMAGE}]},
                        },
                    },
                },
            )
            yield RealStage(client, namespace)
        finally:
            if ARTEFACTS:
                folder = ARTEFACTS / namespace
                await asyncio.to_thread(keep, Kubectl(namespace), folder)
            await core.delete_namespace(namespace)


@pytest.mark.parametrize("each", BODY, ids=lambda each: each.__name__)
def test_what_a_launcher_does_on_any_cluster(each):
    async def test() -> None:
        async with stage_in_namespace_of_its_own() as stage:
            await each(stage)

    asyncio.run(test())
