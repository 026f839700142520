"""A launcher on a cluster in memory, in virtual time."""

from __future__ import annotations

from contextlib import asynccontextmanager

from kubernetes.aio.client import ApiClient, Configuration

from tests.support.kubernetes import gateway
from tests.support.kubernetes.cluster import FakeCluster, Image
from tests.support.kubernetes.gateway import spec, until
from tests.support.kubernetes.server import Session
from tests.support.virtual_time import run_in_virtual_time

__all__ = ["FakeStage", "Gateway", "on_cluster", "running_cluster", "spec", "until"]


class Gateway(gateway.Gateway):
    """The last request of a dead gateway may still reach the server (`session`)."""

    def __init__(self, cluster: FakeCluster, **about: float) -> None:
        self.cluster = cluster
        self.session = Session(cluster)

        async def connect() -> ApiClient:
            client = ApiClient(Configuration(host="http://cluster"))
            client.rest_client.pool_manager = self.session
            return client

        super().__init__(connect, namespace=cluster.namespace, **about)

    async def die(self) -> None:
        self.session.severed.set()
        await super().die()


class FakeStage:
    """Implements `body.Stage`."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        cluster.images["127.0.0.1:1/nothing:1"] = Image(error="connection refused")

    def gateway(self, **about: float) -> Gateway:
        return Gateway(self.cluster, **about)

    async def left(self) -> dict[str, list[str]]:
        return self.cluster.owned()

    async def delete_pod(self, name: str) -> None:
        self.cluster.delete("pods", name)


@asynccontextmanager
async def running_cluster(**about):
    cluster = FakeCluster(**about)
    cluster.open()
    try:
        yield cluster
    finally:
        await cluster.close()


def on_cluster(**about):
    """Run a test with a cluster in virtual time."""

    def wrap(test):
        def run() -> None:
            async def in_cluster() -> None:
                async with running_cluster(**about) as cluster:
                    await test(cluster)

            run_in_virtual_time(in_cluster())

        run.__name__ = test.__name__
        run.__doc__ = test.__doc__
        return run

    return wrap
