"""A gateway that dies between any two calls, and an API server that does not answer well."""

from __future__ import annotations

import asyncio

import pytest

from tandem.errors import WorkerMayRun, WorkerStartFailed
from tests.support.kubernetes.cluster import Image
from tests.support.kubernetes.server import Answer, Hangs, Lost, refusal
from tests.support.kubernetes.world import Gateway, on_cluster, running_cluster, spec, until
from tests.support.virtual_time import run_in_virtual_time

NODES = 2
NAME = "trainer-s-1-0"


async def live(gateway: Gateway) -> None:
    """Start a worker of two pods, let it serve, and stop it."""
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
    assert adopted >= 2  # it served, and nobody had asked it to end
    assert removed > 10


async def killed_at(cut: int, *, carried_out: bool) -> int:
    """Return how many workers the next gateway adopts; nothing else is left, and nothing at all
    once that is stopped."""
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
            await second.launcher.wait_ready(NAME)
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
    await second.launcher.wait_ready("trainer-s-1-0")
    await asyncio.sleep(100)
    assert cluster.pod("trainer-s-1-0")["metadata"]["uid"] == pod
    cluster.exit("trainer-s-1-0", code=3)
    await until(lambda: second.exits)
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
        assert await second.open() == []
        assert "pods" not in cluster.owned()
        await second.close()

    test()


@on_cluster()
async def test_what_a_superseded_gateway_makes_late_is_deleted_and_it_touches_nothing(cluster):
    first, second = Gateway(cluster, epoch=1), Gateway(cluster, epoch=2)
    await first.open()
    await second.open()
    await second.run("trainer-s-2-0")
    await until(lambda: first.superseded)
    _, late = await first.maker.make(spec("trainer-s-1-0"))
    cluster.put("secrets", late.secret)
    cluster.put("pods", {**late.pods[0], "status": {"phase": "Pending"}})
    await until(lambda: cluster.owned()["pods"] == ["trainer-s-2-0"])
    await until(lambda: cluster.owned()["secrets"] == ["trainer-s-2-0"])
    assert second.exits == []
    await first.die()
    await second.close()


@on_cluster()
async def test_what_an_earlier_gateway_made_late_is_not_taken_for_the_own(cluster):
    first, second = Gateway(cluster, epoch=1), Gateway(cluster, epoch=2)
    await second.open()
    _, late = await first.maker.make(spec(NAME))
    second.launcher._reconciler.sweeps = False
    for plural, body in (("secrets", late.secret), ("pods", late.pods[0])):
        cluster.put(plural, {**body, "status": {"phase": "Pending"}})
    uids = {cluster.get(plural, NAME)["metadata"]["uid"] for plural in ("secrets", "pods")}
    await asyncio.sleep(1)
    await second.run(NAME)
    assert cluster.pod(NAME)["metadata"]["uid"] not in uids
    assert cluster.get("secrets", NAME)["metadata"]["uid"] not in uids
    await second.close()


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
    gateway = Gateway(cluster)
    await gateway.open()
    await gateway.run("trainer-s-1-0")
    cluster.collect(cluster.get("deployments", "tandem")["metadata"]["uid"])
    await until(lambda: not cluster.owned())
    await gateway.close()


# --- The API server --------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["create", "delete", "get", "list"])
@pytest.mark.parametrize("how", ["500", "429", "lost before", "lost after", "hangs"])
def test_each_call_may_fail_once_and_the_worker_comes_and_goes_all_the_same(verb, how):
    @on_cluster()
    async def test(cluster):
        failed: set[str] = set()

        def meddle(call):
            if call.verb != verb or call.resource in failed:
                return None
            failed.add(call.resource)
            if how == "lost before":
                raise Lost(after=False)
            if how == "lost after":
                raise Lost(after=True)
            if how == "hangs":
                raise Hangs(after=True)
            retry_after = 7 if how == "429" else 0
            return refusal(int(how), "", "too busy", retry_after=retry_after)

        cluster.meddle = meddle
        gateway = Gateway(cluster, nodes=2, idle=0)
        await gateway.open()
        await gateway.run(NAME)
        assert len(cluster.all("pods")) == 2
        await gateway.launcher.stop(NAME)
        await until(lambda: not cluster.owned())
        await gateway.close()

    test()


@on_cluster()
async def test_while_the_api_server_is_away_nothing_is_reported_and_few_calls_are_made(cluster):
    gateway = Gateway(cluster, pending_timeout=600)
    await gateway.open()
    await gateway.run("trainer-s-1-0")
    assert gateway.launcher.reports
    cluster.meddle = lambda _call: refusal(503, "ServiceUnavailable", "away")
    cluster.close_watches(broken=True)
    starts = [asyncio.create_task(gateway.run(f"trainer-s-2-{number}")) for number in range(20)]
    await until(lambda: not gateway.launcher.reports)
    before = len(cluster.calls)
    began = cluster.now
    await asyncio.sleep(45)
    assert cluster.now - began >= 45
    assert len(cluster.calls) - before < 30
    assert "the API server does not answer (503 away)" in gateway.launcher.explain("trainer-s-2-0")
    with pytest.raises(WorkerMayRun, match="the API server does not answer"):
        await gateway.launcher.stop("trainer-s-1-0")
    cluster.meddle = lambda _call: None
    await asyncio.gather(*starts)
    assert gateway.launcher.reports
    await gateway.launcher.stop("trainer-s-1-0")
    assert len(cluster.all("pods")) == 20
    await gateway.close()


@on_cluster()
async def test_an_api_server_that_hangs_is_told_after_the_time_of_one_request(cluster):
    def hang(_call):
        raise Hangs(after=False)

    gateway = Gateway(cluster, pending_timeout=600)
    await gateway.open()
    cluster.meddle = hang
    start = asyncio.create_task(gateway.run(NAME))
    await asyncio.sleep(11)
    assert not gateway.launcher.reports
    said = "the API server does not answer (TimeoutError)"
    assert gateway.launcher.explain(NAME) == said
    cluster.meddle = lambda _call: None
    await start
    assert gateway.launcher.reports
    await gateway.close()


@on_cluster()
async def test_a_node_that_came_back_while_the_api_server_was_away_has_lost_nothing(cluster):
    gateway = Gateway(cluster, node_lost=30)
    await gateway.open()
    await gateway.run(NAME)
    cluster.lose_node("node-0")
    await until(lambda: "does not answer" in gateway.launcher.explain(NAME))
    cluster.meddle = lambda _call: refusal(500, "InternalError", "away")
    cluster.close_watches(broken=True)
    await asyncio.sleep(50)
    cluster._condition(cluster.pod(NAME), "Ready", True)
    await asyncio.sleep(50)
    cluster.meddle = lambda _call: None
    await until(lambda: gateway.launcher.reports)
    await asyncio.sleep(50)
    assert gateway.exits == [] and "deletionTimestamp" not in cluster.pod(NAME)["metadata"]
    await gateway.close()


@on_cluster()
async def test_an_end_that_happened_while_the_api_server_was_away_is_told_afterwards(cluster):
    gateway = Gateway(cluster)
    await gateway.open()
    await gateway.run(NAME)
    cluster.meddle = lambda _call: refusal(500, "InternalError", "away")
    cluster.close_watches(broken=True)
    await asyncio.sleep(20)
    cluster.run_out_of_memory(NAME)
    await asyncio.sleep(20)
    assert gateway.exits == []
    cluster.meddle = lambda _call: None
    await until(lambda: gateway.exits)
    await gateway.close()


@on_cluster()
async def test_a_watch_whose_version_is_too_old_begins_with_a_list(cluster):
    gateway = Gateway(cluster)
    await gateway.open()
    await gateway.run(NAME)
    cluster.compact()
    cluster.close_watches()
    cluster.run_out_of_memory(NAME)
    cluster.compact()
    await until(lambda: gateway.exits, seconds=10)
    assert gateway.launcher.reports
    await gateway.close()


@on_cluster()
async def test_a_server_that_closes_every_watch_is_asked_about_once_a_second(cluster):
    gateway = Gateway(cluster)
    await gateway.open()
    await gateway.run(NAME)
    before, began = len(cluster.calls), cluster.now
    while cluster.now < began + 30:
        cluster.close_watches()
        await asyncio.sleep(0.05)
    assert len(cluster.calls) - before < 4 * 40
    assert gateway.launcher.reports
    await gateway.close()


@on_cluster()
async def test_a_server_that_lists_and_refuses_every_watch_is_asked_less_and_less(cluster):
    gateway = Gateway(cluster)
    await gateway.open()
    refused = refusal(403, "Forbidden", "no watch")
    cluster.meddle = lambda call: refused if call.verb == "watch" else None
    cluster.close_watches()
    await asyncio.sleep(30)
    before = len(cluster.calls)
    await asyncio.sleep(60)
    assert len(cluster.calls) - before <= 4 * 2 * 5  # of four kinds a list and a watch each
    cluster.meddle = lambda _call: None
    await until(lambda: gateway.launcher.reports, seconds=20)
    await gateway.close()


@on_cluster()
async def test_a_change_that_no_watch_tells_is_found_when_all_is_listed_again(cluster):
    gateway = Gateway(cluster)
    await gateway.open()
    await gateway.run(NAME)
    cluster.objects["pods"].pop(NAME)  # nobody is told
    await until(lambda: gateway.exits, seconds=70)
    assert gateway.exits == [(NAME, "the trainer's pod was deleted, not by the gateway")]
    await gateway.close()


@on_cluster()
async def test_a_list_that_comes_late_does_not_take_away_what_was_made_since(cluster):
    gateway = Gateway(cluster)
    await gateway.open()
    answer, lists = cluster.handle, 0

    async def late(method, url, body):
        nonlocal lists
        answered = await answer(method, url, body)
        if method == "GET" and "/pods?" in url and "watch=" not in url:
            lists += 1
            await asyncio.sleep(5)
        return answered

    cluster.handle, cluster.latency = late, 0.3
    await until(lambda: lists)
    await gateway.run(NAME)
    assert lists == 1
    await asyncio.sleep(100)
    assert gateway.exits == []
    await gateway.close()


@pytest.mark.parametrize("body", ["a page of a proxy", "[]", '{"items": [{}], "metadata": {}}'])
def test_an_answer_that_cannot_be_read_is_asked_for_again(body):
    @on_cluster()
    async def test(cluster):
        gateway = Gateway(cluster)
        await gateway.open()
        await gateway.run(NAME)
        wrong = Answer(200, body)
        cluster.meddle = lambda call: wrong if call.verb in ("list", "create") else None
        await until(lambda: not gateway.launcher.reports)
        cluster.meddle = lambda _call: None
        await until(lambda: gateway.launcher.reports)
        cluster.run_out_of_memory(NAME)
        await until(lambda: gateway.exits)
        await gateway.close()

    test()


@on_cluster()
async def test_a_watch_that_brings_nothing_and_does_not_end_is_found_out(cluster):
    gateway = Gateway(cluster)
    await gateway.open()
    await gateway.run(NAME)
    cluster._watch = silent
    cluster.close_watches()
    await asyncio.sleep(2)
    before = cluster.now
    cluster.run_out_of_memory(NAME)
    await until(lambda: gateway.exits)
    assert cluster.now - before < 70
    await gateway.close()


async def silent(_plural, _query):
    await asyncio.Event().wait()
    yield


@on_cluster()
async def test_a_token_that_has_expired_is_renewed(cluster):
    gateway = Gateway(cluster)
    await gateway.open()
    await gateway.run(NAME)
    api, renewed = gateway.launcher._api, False
    connect = api._connect

    async def again():
        nonlocal renewed
        renewed = True
        client = await connect()
        client.configuration.api_key = {"BearerToken": "new"}
        return client

    api._connect = again
    cluster.meddle = lambda _call: None if renewed else refusal(401, "Unauthorized", "expired")
    cluster.close_watches()
    await gateway.launcher.stop(NAME)
    assert renewed and api._client.configuration.api_key == {"BearerToken": "new"}
    await until(lambda: gateway.launcher.reports)
    await gateway.close()


@on_cluster()
async def test_a_cluster_that_is_not_reached_is_said_at_the_gateways_start(cluster):
    cluster.meddle = lambda _call: refusal(500, "InternalError", "away")
    gateway = Gateway(cluster)
    with pytest.raises(WorkerMayRun, match="the cluster cannot be asked for its workers"):
        await gateway.open()
    await gateway.die()


@on_cluster(nodes=4)
async def test_fifty_sessions_at_once_leave_no_doubt_no_double_and_nothing(cluster):
    for node in cluster.nodes.values():
        node.memory = 10 * 2**30  # 40 of the 50 fit
    cluster.images["worker:1"] = Image(pull=5)
    gateway = Gateway(cluster, idle=0)
    gateway.maker.memory = "1Gi"
    await gateway.open()
    names = [f"trainer-s-{number}-0" for number in range(50)]
    starts = {
        name: asyncio.create_task(gateway.run(name, group=f"train-{number % 16}"))
        for number, name in enumerate(names)
    }
    await asyncio.sleep(30)
    waiting = [name for name in names if not starts[name].done()]
    assert waiting and all(gateway.launcher.explain(name) for name in waiting)
    ends = await asyncio.gather(*starts.values(), return_exceptions=True)
    served = [name for name, end in zip(names, ends, strict=True) if not isinstance(end, Exception)]
    failed = [str(end) for end in ends if isinstance(end, Exception)]
    assert sorted(pod["metadata"]["name"] for pod in cluster.all("pods")) == sorted(served)
    assert failed and all("not scheduled within 60 s" in said for said in failed)
    made = [call.name for call in cluster.calls if call.rule == ("create", "pods")]
    assert len(made) <= 50
    await asyncio.gather(*(gateway.launcher.stop(name) for name in served))
    await until(lambda: not cluster.owned())
    await gateway.close()
