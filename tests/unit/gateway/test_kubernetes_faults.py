from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from gateway.workers.launchers.kubernetes.names import PODS
from tandem.errors import WorkerMayRun, WorkerStartFailed
from tests.support.kubernetes.cluster import Image
from tests.support.kubernetes.server import Answer, Hangs, Lost, refusal
from tests.support.kubernetes.world import Gateway, on_cluster, spec, until

NAME = "trainer-s-1-0"


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
async def test_a_worker_is_not_gone_before_it_is_known_what_a_lost_creation_has_made(cluster):
    async with Gateway(cluster, api_timeout=20) as gateway:
        cluster._watch = silent
        cluster.close_watches()
        await asyncio.sleep(2)
        lost = False

        def meddle(call):
            nonlocal lost
            if call.rule != ("create", "pods"):
                return None
            if lost:
                return refusal(503, "ServiceUnavailable", "away")
            lost = True
            raise Lost(after=True)

        cluster.meddle = meddle
        start = asyncio.create_task(gateway.launcher.start(spec(NAME)))
        await until(lambda: cluster.all("pods"))
        stop = asyncio.create_task(gateway.launcher.stop(NAME))
        await asyncio.sleep(20)
        assert not stop.done() and cluster.all("pods")
        assert "not gone yet" in gateway.launcher.explain(NAME)
        await stop
        assert not cluster.all("pods")
        await asyncio.gather(start, return_exceptions=True)


@on_cluster()
async def test_while_the_api_server_is_away_nothing_is_reported_and_few_calls_are_made(cluster):
    async with Gateway(cluster, pending_timeout=600) as gateway:
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
        assert "the API server does not answer (503 away)" in gateway.launcher.explain(
            "trainer-s-2-0"
        )
        stop = asyncio.create_task(gateway.launcher.stop("trainer-s-1-0"))
        await asyncio.sleep(40)
        assert gateway.launcher.explain("trainer-s-1-0") == "the API server does not answer"
        assert not stop.done()
        cluster.meddle = lambda _call: None
        await asyncio.gather(*starts)
        assert gateway.launcher.reports
        await stop
        assert len(cluster.all("pods")) == 20


@on_cluster()
async def test_an_api_server_that_hangs_is_told_after_the_time_of_one_request(cluster):
    def hang(_call):
        raise Hangs(after=False)

    async with Gateway(cluster, pending_timeout=600) as gateway:
        cluster.meddle = hang
        start = asyncio.create_task(gateway.run(NAME))
        await asyncio.sleep(11)
        assert not gateway.launcher.reports
        said = "the API server does not answer (TimeoutError)"
        assert gateway.launcher.explain(NAME) == said
        cluster.meddle = lambda _call: None
        await start
        assert gateway.launcher.reports


@on_cluster()
async def test_a_node_that_came_back_while_the_api_server_was_away_has_lost_nothing(cluster):
    async with Gateway(cluster, node_lost=30) as gateway:
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


@on_cluster()
async def test_an_end_that_happened_while_the_api_server_was_away_is_told_afterwards(cluster):
    async with Gateway(cluster) as gateway:
        await gateway.run(NAME)
        cluster.meddle = lambda _call: refusal(500, "InternalError", "away")
        cluster.close_watches(broken=True)
        await asyncio.sleep(20)
        cluster.run_out_of_memory(NAME)
        await asyncio.sleep(20)
        assert gateway.exits == []
        cluster.meddle = lambda _call: None
        await until(lambda: gateway.exits)


@on_cluster()
async def test_a_watch_that_breaks_goes_on_where_it_was_and_misses_nothing(cluster):
    async with Gateway(cluster, resync=1000) as gateway:
        await gateway.run(NAME)
        before = len(cluster.calls)
        cluster.close_watches(broken=True)
        cluster.run_out_of_memory(NAME)
        await until(lambda: gateway.exits)
        await until(lambda: gateway.launcher.reports)
        assert "list" not in {call.verb for call in cluster.calls[before:]}


@on_cluster()
async def test_a_watch_that_is_refused_for_some_time_is_asked_for_after_it_and_goes_on(cluster):
    async with Gateway(cluster, resync=1000) as gateway:
        await gateway.run(NAME)
        asked: list[float] = []

        def meddle(call):
            if call.rule != ("watch", "pods"):
                return None
            asked.append(call.at)
            return refusal(429, "TooManyRequests", "", retry_after=40) if len(asked) < 3 else None

        cluster.meddle = meddle
        before = len(cluster.calls)
        cluster.latency = 3.0
        other = asyncio.create_task(gateway.launcher._api.read(PODS, NAME))
        await asyncio.sleep(0.1)
        cluster.latency = 0.0
        cluster.close_watches(broken=True)
        await until(lambda: len(asked) == 1)
        await other  # one answer does not prove that watches work
        await until(lambda: len(asked) == 2)
        assert not gateway.launcher.reports
        cluster.run_out_of_memory(NAME)
        await until(lambda: gateway.exits)
        assert len(asked) == 3
        assert [round(later - earlier) for earlier, later in pairwise(asked)] == [40, 40]
        assert "list" not in {call.verb for call in cluster.calls[before:]}
        await until(lambda: gateway.launcher.reports)


@on_cluster()
async def test_a_watch_whose_version_is_too_old_begins_with_a_list(cluster):
    async with Gateway(cluster) as gateway:
        await gateway.run(NAME)
        cluster.compact()
        cluster.close_watches()
        cluster.run_out_of_memory(NAME)
        cluster.compact()
        await until(lambda: gateway.exits, seconds=10)
        assert gateway.launcher.reports


@on_cluster()
async def test_a_server_that_closes_every_watch_is_asked_about_once_a_second(cluster):
    async with Gateway(cluster) as gateway:
        await gateway.run(NAME)
        before, began = len(cluster.calls), cluster.now
        while cluster.now < began + 30:
            cluster.close_watches()
            await asyncio.sleep(0.05)
        assert len(cluster.calls) - before < 4 * 40
        assert gateway.launcher.reports


@on_cluster()
async def test_a_server_that_lists_and_refuses_every_watch_is_asked_less_and_less(cluster):
    async with Gateway(cluster) as gateway:
        refused = refusal(403, "Forbidden", "no watch")
        cluster.meddle = lambda call: refused if call.verb == "watch" else None
        cluster.close_watches()
        await asyncio.sleep(30)
        before = len(cluster.calls)
        await asyncio.sleep(60)
        assert len(cluster.calls) - before <= 4 * 2 * 5  # a list and a watch of each of four kinds
        cluster.meddle = lambda _call: None
        await until(lambda: gateway.launcher.reports, seconds=20)


@on_cluster()
async def test_a_change_that_no_watch_tells_is_found_when_all_is_listed_again(cluster):
    async with Gateway(cluster) as gateway:
        await gateway.run(NAME)
        cluster.objects["pods"].pop(NAME)  # without an event
        await until(lambda: gateway.exits, seconds=70)
        assert gateway.exits == [(NAME, "the trainer's pod was deleted, not by the gateway")]


@on_cluster()
async def test_a_list_that_comes_late_does_not_take_away_what_was_made_since(cluster):
    async with Gateway(cluster) as gateway:
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
    async with Gateway(cluster) as gateway:
        await gateway.run(NAME)
        cluster._watch = silent
        cluster.close_watches()
        await asyncio.sleep(2)
        before = cluster.now
        cluster.run_out_of_memory(NAME)
        await until(lambda: gateway.exits)
        assert cluster.now - before < 70


async def silent(_plural, _query):
    await asyncio.Event().wait()
    yield


@on_cluster()
async def test_a_failed_start_is_told_before_its_pods_are_gone(cluster):
    cluster.images["worker:1"] = Image(error="manifest unknown")
    async with Gateway(cluster, idle=0) as gateway:
        away = refusal(503, "ServiceUnavailable", "away")
        cluster.meddle = lambda call: away if call.verb == "delete" else None
        with pytest.raises(WorkerStartFailed, match=r"did not run within .*manifest unknown"):
            await gateway.launcher.start(spec(NAME))
        stop = asyncio.create_task(gateway.launcher.stop(NAME))
        await asyncio.sleep(100)
        assert not stop.done() and "not gone yet" in gateway.launcher.explain(NAME)
        cluster.meddle = lambda _call: None
        await stop
        await until(lambda: not cluster.owned())


@on_cluster()
async def test_a_token_that_has_expired_is_renewed(cluster):
    async with Gateway(cluster) as gateway:
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
    await until(lambda: {pod["metadata"]["name"] for pod in cluster.all("pods")} == set(served))
    assert failed and all("not scheduled within 60 s" in said for said in failed)
    made = [call.name for call in cluster.calls if call.rule == ("create", "pods")]
    assert len(made) <= 50
    await asyncio.gather(*(gateway.launcher.stop(name) for name in served))
    await until(lambda: not cluster.owned())
    await gateway.close()
