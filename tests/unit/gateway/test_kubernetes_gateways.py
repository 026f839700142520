from __future__ import annotations

import asyncio

import pytest

from tandem.errors import WorkerStartFailed
from tests.support.kubernetes.cluster import Image
from tests.support.kubernetes.world import Gateway, on_cluster, running_cluster, spec, until
from tests.support.virtual_time import run_in_virtual_time

NODES = 2
NAME = "trainer-s-1-0"


async def live(gateway: Gateway) -> None:
    await gateway.open()
    await gateway.run(NAME)
    await gateway.launcher.stop(NAME)
    await until(lambda: not gateway.cluster.owned())


def requests_of_a_life() -> int:
    async def count() -> int:
        async with running_cluster() as cluster:
            gateway = Gateway(cluster, nodes=NODES, idle=1)
            await live(gateway)
            await gateway.close()
            return gateway.session.requests

    return run_in_virtual_time(count())


def test_a_gateway_that_is_killed_between_any_two_calls_leaves_nothing_and_adopts_what_runs():
    adopted, removed = 0, 0
    for cut in range(requests_of_a_life()):
        for carried_out in (False, True):
            number = run_in_virtual_time(killed_at(cut, carried_out=carried_out))
            adopted, removed = adopted + number, removed + (1 - number)
    assert adopted >= 2  # it served, and nobody asked it to end
    assert removed > 10


async def killed_at(cut: int, *, carried_out: bool) -> int:
    """Return the number of adopted workers. Check that nothing else is left, and nothing after
    their stop."""
    async with running_cluster() as cluster:
        first = Gateway(cluster, nodes=NODES, idle=1, epoch=1)
        first.session.sever_at, first.session.sever_after = cut, carried_out
        life = asyncio.create_task(live(first))
        await until(lambda: life.done() or first.session.severed.is_set())
        life.cancel()
        await first.die()
        await asyncio.sleep(3)  # a node may be about to run a pod
        running = sorted(
            pod["metadata"]["name"]
            for pod in cluster.all("pods")
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        )
        second = Gateway(cluster, nodes=NODES, idle=1, epoch=2)
        found = await second.open()
        assert len(found) == (len(running) == NODES), (cut, carried_out)
        if found:
            assert found[0].secret == f"secret of {NAME}"
        else:  # as for the row of a process that is not listed
            await second.launcher.stop(NAME, at_once=True)
        assert cluster.owned().get("pods", []) == (running if found else [])
        await second.launcher.stop(NAME)
        await until(lambda: not cluster.owned())
        await second.close()
        return len(found)


@on_cluster()
async def test_the_next_gateway_adopts_a_worker_and_hears_of_its_end(cluster):
    first, second = Gateway(cluster, epoch=1), Gateway(cluster, epoch=2)
    await first.open()
    handle = await first.run("trainer-s-1-0")
    await first.close()
    pod = cluster.pod("trainer-s-1-0")["metadata"]["uid"]
    assert await second.open() == [handle]
    await asyncio.sleep(100)
    assert cluster.pod("trainer-s-1-0")["metadata"]["uid"] == pod
    cluster.exit("trainer-s-1-0", code=3)
    await until(lambda: second.exits)
    await second.close()


@on_cluster()
async def test_the_next_gateway_keeps_a_worker_whose_node_is_lost_for_a_moment(cluster):
    first, second = Gateway(cluster, epoch=1), Gateway(cluster, epoch=2, node_lost=100)
    await first.open()
    handle = await first.run(NAME)
    cluster.lose_node("node-0")
    await until(lambda: "does not answer" in first.launcher.explain(NAME))
    await first.close()
    assert await second.open() == [handle]
    assert "does not answer" in second.launcher.explain(NAME)
    cluster._condition(cluster.pod(NAME), "Ready", True)
    await asyncio.sleep(200)
    assert "deletionTimestamp" not in cluster.pod(NAME)["metadata"]
    assert second.exits == []
    await second.close()


@pytest.mark.parametrize("pull", [0, 1000])
def test_a_pod_that_ends_on_a_lost_node_keeps_no_gateway_from_its_start(pull):
    @on_cluster()
    async def test(cluster):
        cluster.images["worker:1"] = Image(pull=pull)
        first = Gateway(cluster, epoch=1)
        await first.open()
        start = asyncio.create_task(first.launcher.start(spec(NAME)))
        await asyncio.sleep(10)
        start.cancel()
        await first.die()
        cluster.lose_node(cluster.pod(NAME)["spec"]["nodeName"])
        cluster.delete("pods", NAME)
        second = Gateway(cluster, epoch=2, node_lost=100)
        before = cluster.now
        assert await second.open() == []
        assert cluster.now - before < 10
        await until(lambda: "pods" not in cluster.owned())
        await second.close()

    test()


@on_cluster()
async def test_what_a_superseded_gateway_makes_late_is_deleted_and_it_touches_nothing(cluster):
    first, second = Gateway(cluster, epoch=1), Gateway(cluster, epoch=2)
    await first.open()
    await second.open()
    await second.run("trainer-s-2-0")
    await until(lambda: first.superseded)
    _, late = first.maker.make(spec("trainer-s-1-0"))
    cluster.put("secrets", late.secret)
    cluster.put("pods", {**late.pods[0], "status": {"phase": "Pending"}})
    await until(lambda: cluster.owned()["pods"] == ["trainer-s-2-0"])
    await until(lambda: cluster.owned()["secrets"] == ["trainer-s-2-0"])
    assert second.exits == []
    await first.die()
    await second.close()


@pytest.mark.parametrize("left", [("secrets", "pods"), ("secrets",), ("pods",)])
def test_what_an_earlier_gateway_made_late_is_not_taken_for_the_own(left):
    @on_cluster()
    async def test(cluster):
        first, second = Gateway(cluster, epoch=1), Gateway(cluster, epoch=2)
        await second.open()
        _, late = first.maker.make(spec(NAME))
        second.launcher._reconciler.sweeps = False
        bodies = {"secrets": late.secret, "pods": late.pods[0]}
        for plural in left:
            cluster.put(plural, {**bodies[plural], "status": {"phase": "Pending"}})
        uids = {cluster.get(plural, NAME)["metadata"]["uid"] for plural in left}
        await asyncio.sleep(1)
        await second.run(NAME)
        assert cluster.pod(NAME)["metadata"]["uid"] not in uids
        assert cluster.get("secrets", NAME)["metadata"]["uid"] not in uids
        await second.close()

    test()


@on_cluster()
async def test_a_gateway_whose_worker_was_adopted_learns_that_it_was_superseded(cluster):
    first, second = Gateway(cluster, epoch=1), Gateway(cluster, epoch=2)
    await first.open()
    handle = await first.run(NAME)
    assert await second.open() == [handle]
    await until(lambda: first.superseded, seconds=5)
    assert not second.superseded
    await first.die()
    await second.launcher.stop(NAME)
    assert second.exits == []
    await second.close()


@on_cluster()
async def test_objects_of_others_are_never_touched_and_never_taken(cluster):
    gateway = Gateway(cluster, idle=0)
    other = {"metadata": {"name": "trainer-s-1-0", "labels": {"tandem.dev/instance": "other"}}}
    cluster.put("secrets", other)
    await gateway.open()
    with pytest.raises(WorkerStartFailed, match="there is a Secret trainer-s-1-0 that is not"):
        await gateway.launcher.start(spec("trainer-s-1-0"))
    await gateway.launcher.stop("trainer-s-1-0")
    await asyncio.sleep(100)
    assert cluster.owned() == {"secrets": ["trainer-s-1-0"]}
    await gateway.close()


@on_cluster()
async def test_the_end_of_the_deployment_ends_its_workers(cluster):
    async with Gateway(cluster) as gateway:
        await gateway.run("trainer-s-1-0")
        cluster.collect(cluster.get("deployments", "tandem")["metadata"]["uid"])
        await until(lambda: not cluster.owned())


@on_cluster()
async def test_what_a_gateway_that_wakes_was_about_to_delete_stays_where_the_next_has_adopted_it(
    cluster,
):
    first, second = Gateway(cluster, epoch=1), Gateway(cluster, epoch=2)
    names = ["trainer-s-1-0", "trainer-s-2-0"]
    await first.open()
    for name in names:
        await first.run(name)
    first.session.awake.clear()
    stops = [asyncio.create_task(first.launcher.stop(name)) for name in names]
    await asyncio.sleep(1)
    assert len(await second.open()) == 2
    first.session.awake.set()
    _, late = await asyncio.wait(stops, timeout=60)
    assert late == {*stops}, "nobody knows that they are gone"
    sent = [call.name for call in cluster.calls if call.rule == ("delete", "pods")]
    assert sorted(sent) == names
    assert not any("deletionTimestamp" in pod["metadata"] for pod in cluster.all("pods"))
    assert first.superseded and second.exits == []
    for stop in stops:
        stop.cancel()
    await first.die()
    await second.close()


@on_cluster()
async def test_a_delete_that_comes_late_finds_another_object_of_that_name_and_leaves_it(cluster):
    first, second = Gateway(cluster, epoch=1), Gateway(cluster, epoch=2)
    await first.open()
    await first.run(NAME)
    go, send = asyncio.Event(), first.session.request

    async def late(*, method, url, **others):
        if method == "DELETE" and "/secrets/" in url:
            await go.wait()
        return await send(method=method, url=url, **others)

    first.session.request = late
    stop = asyncio.create_task(first.launcher.stop(NAME))
    await until(lambda: not cluster.all("pods"))
    await second.open()
    await second.run(NAME)
    uid = cluster.get("secrets", NAME)["metadata"]["uid"]
    go.set()
    await asyncio.sleep(30)
    assert cluster.get("secrets", NAME)["metadata"]["uid"] == uid
    assert second.exits == []
    stop.cancel()
    await first.die()
    await second.close()
