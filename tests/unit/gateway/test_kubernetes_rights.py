from __future__ import annotations

import yaml

from gateway.workers.launchers.kubernetes import names
from gateway.workers.launchers.kubernetes.serving import SERVING
from tests.support.kubernetes.cluster import FakeCluster, Image
from tests.support.kubernetes.manifests import K8S
from tests.support.kubernetes.server import Lost
from tests.support.kubernetes.world import Gateway, on_cluster, running_cluster, until
from tests.support.virtual_time import run_in_virtual_time

NAME = "trainer-s-1-0"
POD = "tandem-7c4f-x"
NODES = 2


def rules() -> list[dict]:
    found = yaml.safe_load_all((K8S / "base" / "rbac.yaml").read_text())
    (role,) = (one for one in found if one["kind"] == "Role")
    return role["rules"]


def test_the_role_allows_the_calls_of_the_launcher_and_no_others():
    allowed = {
        (verb, resource)
        for rule in rules()
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }
    assert run_in_virtual_time(all_calls()) == allowed


def test_each_resource_is_of_the_group_in_which_the_launcher_asks_for_it():
    asked = (each for each in vars(names).values() if isinstance(each, names.Resource))
    groups = {each.plural: each.api_version.rpartition("/")[0] for each in asked}
    for rule in rules():
        for resource in rule["resources"]:
            assert rule["apiGroups"] == [groups[resource.partition("/")[0]]]


async def all_calls() -> set[tuple[str, str]]:
    """Calls of whole lives, each with one lost answer, and of waiting and failing pods."""
    async with running_cluster() as cluster:
        number = await live(cluster)
        calls = {call.rule for call in cluster.calls}
    for cut in range(number):
        async with running_cluster() as cluster:
            await live(cluster, lost=cut)
            calls |= {call.rule for call in cluster.calls}
    async with running_cluster() as cluster:
        await fail(cluster)
        return calls | {call.rule for call in cluster.calls}


async def live(cluster: FakeCluster, *, lost: int = -1) -> int:
    """Start and stop a worker of two pods, with a next gateway. Return the number of calls."""

    def lose(call) -> None:
        if call.number == lost and call.verb != "watch":
            raise Lost(after=True)

    cluster.meddle = lose
    put_gateways(cluster)
    gateway = Gateway(cluster, nodes=NODES, idle=1, pod=POD)
    await gateway.open()
    await gateway.run(NAME)
    await gateway.launcher.stop(NAME)
    await until(lambda: "resourceclaims" not in cluster.owned())
    await gateway.close()
    return sum(call.verb != "watch" for call in cluster.calls)


async def fail(cluster: FakeCluster) -> None:
    cluster.images["worker:1"] = Image(pull=20)
    async with Gateway(cluster) as gateway:
        await gateway.run(NAME)
        cluster.exit(NAME, code=1)
        await until(lambda: gateway.exits)


def put_gateways(cluster: FakeCluster, *, serving: str = "") -> None:
    for name in (POD, "tandem-7c4f-y"):
        labels = {SERVING: "tandem"} if name == serving else {}
        put_pod(cluster, name, labels)


def put_pod(cluster: FakeCluster, name: str, labels: dict[str, str]) -> None:
    metadata = {"name": name, "labels": labels}
    spec = {"nodeName": "node-0", "containers": []}
    cluster.put("pods", {"metadata": metadata, "spec": spec, "status": {"phase": "Running"}})


def labelled(cluster: FakeCluster) -> list[str]:
    pods = cluster.all("pods")
    return [pod["metadata"]["name"] for pod in pods if SERVING in pod["metadata"]["labels"]]


@on_cluster()
async def test_the_gateway_that_takes_over_labels_its_pod_and_no_other(cluster):
    put_gateways(cluster, serving="tandem-7c4f-y")
    put_pod(cluster, "z", {SERVING: "another"})
    async with Gateway(cluster, pod=POD):
        assert labelled(cluster) == [POD, "z"]  # the second belongs to another Tandem


@on_cluster()
async def test_a_label_that_was_moved_comes_back(cluster):
    put_gateways(cluster)
    async with Gateway(cluster, pod=POD):
        for pod in cluster.all("pods"):
            other = pod["metadata"]["name"] != POD
            pod["metadata"]["labels"] = {SERVING: "tandem"} if other else {}
        await until(lambda: labelled(cluster) == [POD])


@on_cluster()
async def test_a_pod_that_is_gone_meanwhile_needs_no_label_taken_away(cluster):
    put_gateways(cluster, serving="tandem-7c4f-y")

    def remove(call) -> None:
        if call.verb == "patch":
            cluster.remove("pods", "tandem-7c4f-y")

    cluster.meddle = remove
    async with Gateway(cluster, pod=POD):
        assert labelled(cluster) == [POD]


@on_cluster()
async def test_a_gateway_that_is_in_no_pod_labels_none(cluster):
    async with Gateway(cluster):
        assert "patch" not in {call.verb for call in cluster.calls}
