"""Workers as pods, on a cluster in memory and in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from gateway.workers.launchers.kubernetes.api import Refused
from gateway.workers.launchers.kubernetes.names import PODS
from tandem.errors import WorkerMayRun, WorkerStartFailed
from tests.support.kubernetes.body import BODY
from tests.support.kubernetes.cluster import Image
from tests.support.kubernetes.world import FakeStage, Gateway, on_cluster, spec, until


@pytest.mark.parametrize("each", BODY, ids=lambda each: each.__name__)
def test_what_a_launcher_does_on_any_cluster(each):
    @on_cluster()
    async def test(cluster):
        cluster.device_classes.add("gpu.nvidia.com")
        await each(FakeStage(cluster))

    test()


async def started(gateway, worker_id="trainer-s-1-0", **about):
    task = asyncio.create_task(gateway.launcher.start(spec(worker_id, **about)))
    await asyncio.sleep(0)
    return task


def waits_for(gateway, worker_id="trainer-s-1-0"):
    return gateway.launcher.explain(worker_id)


ENDS = {
    "out of memory": (
        lambda cluster, name: cluster.run_out_of_memory(name),
        "the trainer needed more than the 64Mi that its pod may have; tandem.host_memory raises "
        "that",
    ),
    "evicted": (
        lambda cluster, name: cluster.evict(name, "The node was low on resource: memory."),
        "the trainer's pod was ended: Evicted: The node was low on resource: memory.",
    ),
    "preempted": (
        lambda cluster, name: cluster.preempt(name, "preempting to accommodate a higher pod"),
        "the trainer's pod was taken away: PreemptionByScheduler: preempting to accommodate a "
        "higher pod",
    ),
    "deleted": (
        lambda cluster, name: cluster.delete("pods", name),
        "the trainer's pod was deleted, not by the gateway",
    ),
    "forgotten": (
        lambda cluster, name: cluster.delete("pods", name, grace=0),
        "the trainer's pod was deleted, not by the gateway",
    ),
    "node lost": (
        lambda cluster, name: cluster.lose_node(cluster.pod(name)["spec"]["nodeName"]),
        "the trainer was lost: its node node-0 does not answer the control plane",
    ),
    "killed": (
        lambda cluster, name: cluster.exit(name, code=137),
        "the trainer was killed by SIGKILL",
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_each_end_of_a_pod_is_told_with_its_cause(end):
    @on_cluster()
    async def test(cluster):
        gateway = Gateway(cluster, idle=0)
        await gateway.open()
        await gateway.run("trainer-s-1-0")
        happen, said = ENDS[end]
        happen(cluster, "trainer-s-1-0")
        await until(lambda: gateway.exits)
        assert gateway.exits == [("trainer-s-1-0", said)]
        await until(lambda: not cluster.owned())
        await gateway.close()

    test()


@on_cluster(nodes=0)
async def test_a_pod_that_is_not_scheduled_says_why_and_fails_in_time(cluster):
    async with Gateway(cluster) as gateway:
        start = await started(gateway)
        await until(lambda: "0/0 nodes are available" in waits_for(gateway))
        with pytest.raises(WorkerStartFailed, match=r"not scheduled within 60 s .*0/0 nodes"):
            await start
        assert 60 <= cluster.now < 65


@on_cluster()
async def test_a_full_quota_is_waited_for_as_a_full_node_is(cluster):
    async with Gateway(cluster) as gateway:
        create = gateway.launcher._api.create

        async def refuse(resource, body):
            if resource is PODS and cluster.now < 5:
                said = "is forbidden: exceeded quota: team, limited: requests.memory=32Gi"
                raise Refused(status=403, reason="Forbidden", message=f"its pod {said}")
            return await create(resource, body)

        gateway.launcher._api.create = refuse
        start = await started(gateway)
        await until(lambda: "exceeded quota: team" in waits_for(gateway))
        assert (await start).worker_id == "trainer-s-1-0"


@on_cluster()
async def test_an_image_that_cannot_be_pulled_is_told_and_has_time_of_its_own(cluster):
    cluster.images["worker:1"] = Image(error="manifest unknown")
    async with Gateway(cluster) as gateway:
        start = await started(gateway)
        await until(
            lambda: "the image worker:1: ErrImagePull: manifest unknown" in waits_for(gateway)
        )
        with pytest.raises(WorkerStartFailed, match=r"did not run within 300 s: .*worker:1"):
            await start
        assert cluster.now > 300


@on_cluster()
async def test_a_pod_that_is_deleted_before_it_runs_fails_at_once(cluster):
    cluster.images["worker:1"] = Image(pull=250)
    async with Gateway(cluster) as gateway:
        start = await started(gateway)
        await until(lambda: "is made ready" in waits_for(gateway))
        cluster.lose_node(cluster.pod("trainer-s-1-0")["spec"]["nodeName"])
        cluster.delete("pods", "trainer-s-1-0")
        with pytest.raises(WorkerStartFailed, match="the trainer's pod was deleted, not by"):
            await start
        assert cluster.now < 100


@on_cluster()
async def test_a_slow_image_costs_a_start_nothing_of_its_time(cluster):
    cluster.images["worker:1"] = Image(pull=250)
    async with Gateway(cluster) as gateway:
        await gateway.launcher.start(spec("trainer-s-1-0"))
        assert cluster.now > 250


@on_cluster()
async def test_what_the_driver_says_of_devices_that_it_cannot_prepare_is_told(cluster):
    for node in cluster.nodes.values():
        node.prepare_error = "unknown field sharing"
    async with Gateway(cluster) as gateway:
        start = await started(gateway)
        said = "FailedPrepareDynamicResources: unknown field sharing"
        await until(lambda: said in waits_for(gateway))
        with pytest.raises(WorkerStartFailed, match=said):
            await start
        assert cluster.now < 75


@on_cluster()
async def test_a_claim_that_is_missing_is_named(cluster):
    async with Gateway(cluster) as gateway:
        for node in cluster.nodes.values():
            node.memory = 0
        start = await started(gateway)
        await until(lambda: "Insufficient memory" in waits_for(gateway))
        cluster.remove("resourceclaims", "tandem-train-0")
        cluster.delete("pods", "trainer-s-1-0")
        with pytest.raises(WorkerStartFailed):
            await start


@on_cluster()
async def test_pods_of_one_claim_are_made_one_after_the_other(cluster):
    async with Gateway(cluster) as gateway:
        await asyncio.gather(*(gateway.run(f"trainer-s-{n}-0") for n in range(16)))
        assert cluster.conflicts == 0
        assert len(cluster.all("pods")) == 16
        assert len(cluster.get("resourceclaims", "tandem-train-0")["status"]["reservedFor"]) == 16


@on_cluster()
async def test_a_claim_is_kept_while_it_is_used_and_for_its_idle_time(cluster):
    async with Gateway(cluster, idle=20) as gateway:
        await gateway.run("trainer-s-1-0")
        await gateway.run("trainer-s-2-0")
        await gateway.launcher.stop("trainer-s-1-0")
        await asyncio.sleep(60)
        assert cluster.get("resourceclaims", "tandem-train-0") is not None
        await gateway.launcher.stop("trainer-s-2-0")
        await asyncio.sleep(15)
        assert cluster.get("resourceclaims", "tandem-train-0") is not None
        await asyncio.sleep(15)
        assert cluster.owned() == {}


@on_cluster()
async def test_a_claim_that_comes_into_use_while_it_is_deleted_stays(cluster):
    async with Gateway(cluster, idle=0) as gateway:
        claim = None

        def meddle(call):
            nonlocal claim
            if call.rule == ("delete", "resourceclaims") and claim is None:
                claim = cluster.get("resourceclaims", "tandem-train-0")
                claim["metadata"]["finalizers"] = ["resource.kubernetes.io/delete-protection"]
                claim["status"] = {"reservedFor": [{"name": "other", "uid": "1"}]}
                cluster.change("resourceclaims", claim)

        cluster.meddle = meddle
        await gateway.run("trainer-s-1-0")
        await gateway.launcher.stop("trainer-s-1-0")
        await until(lambda: claim is not None)
        await asyncio.sleep(30)
        assert cluster.get("resourceclaims", "tandem-train-0") is claim
        assert "deletionTimestamp" not in claim["metadata"]
        claim["status"] = {}
        cluster.change("resourceclaims", claim)
        await until(lambda: "deletionTimestamp" in claim["metadata"])


@on_cluster()
async def test_a_worker_that_comes_while_its_claim_is_deleted_gets_one(cluster):
    async with Gateway(cluster, idle=0) as gateway:
        await gateway.run("trainer-s-1-0")
        await gateway.launcher.stop("trainer-s-1-0")
        cluster.latency = 2.0
        await until(lambda: cluster.calls[-1].rule == ("delete", "resourceclaims"))
        await gateway.run("trainer-s-2-0")
        claims = [call.rule for call in cluster.calls if call.resource == "resourceclaims"]
        assert claims.count(("create", "resourceclaims")) == 2
        assert gateway.exits == []


@on_cluster()
async def test_a_claim_of_other_settings_is_replaced_when_nobody_uses_it(cluster):
    async with Gateway(cluster) as gateway:
        await gateway.run("trainer-s-1-0")
        uid = cluster.get("resourceclaims", "tandem-train-0")["metadata"]["uid"]
        gateway.maker.digest = "2"
        await gateway.run("trainer-s-2-0")
        assert cluster.get("resourceclaims", "tandem-train-0")["metadata"]["uid"] == uid
        await gateway.launcher.stop("trainer-s-1-0")
        await gateway.launcher.stop("trainer-s-2-0")
        await gateway.run("trainer-s-3-0")
        assert cluster.get("resourceclaims", "tandem-train-0")["metadata"]["uid"] != uid


@on_cluster()
async def test_a_worker_gets_no_claim_of_other_settings_that_ended_pods_still_hold(cluster):
    """Kubernetes forgets the consumers of a claim a while after their ends."""
    async with Gateway(cluster) as gateway:
        await gateway.run("trainer-s-1-0")
        await gateway.launcher.stop("trainer-s-1-0")
        claim = cluster.get("resourceclaims", "tandem-train-0")
        claim["status"] = {"reservedFor": [{"name": "trainer-s-1-0", "uid": "1"}]}
        cluster.change("resourceclaims", claim)
        gateway.maker.digest = "2"
        starting = asyncio.create_task(gateway.run("trainer-s-2-0"))
        await until(lambda: "hold its claim" in gateway.launcher.explain("trainer-s-2-0"))
        assert cluster.all("pods") == [] and not starting.done()
        claim["status"] = {}
        cluster.change("resourceclaims", claim)
        await starting
        made = cluster.get("resourceclaims", "tandem-train-0")
        assert made["metadata"]["uid"] != claim["metadata"]["uid"]


@on_cluster(nodes=3)
async def test_a_trainer_of_several_nodes_has_a_pod_and_a_claim_on_each(cluster):
    async with Gateway(cluster, nodes=3, idle=0) as gateway:
        handle = await gateway.run("trainer-s-1-0")
        assert handle.address.startswith(cluster.pod("trainer-s-1-0")["status"]["podIP"])
        assert cluster.owned() == {
            "pods": ["trainer-s-1-0", "trainer-s-1-0-1", "trainer-s-1-0-2"],
            "secrets": ["trainer-s-1-0"],
            "services": ["trainer-s-1-0"],
            "networkpolicies": ["trainer-s-1-0"],
            "resourceclaims": ["tandem-train-0-0", "tandem-train-0-1", "tandem-train-0-2"],
        }
        cluster.run_out_of_memory("trainer-s-1-0-1")
        await until(lambda: gateway.exits)
        assert "tandem.host_memory" in gateway.exits[0][1]
        await until(lambda: not cluster.owned())


@on_cluster(nodes=2)
async def test_two_trainers_do_not_wait_for_the_nodes_that_the_other_has_got(cluster):
    for node in cluster.nodes.values():
        node.devices = 2
    answer = cluster.handle

    async def late(method, url, body):
        if method == "POST" and '"name": "trainer-s-1-0-1"' in (body or ""):
            await asyncio.sleep(2)
        return await answer(method, url, body)

    cluster.handle = late
    async with Gateway(cluster, nodes=2, idle=0) as gateway:
        first = asyncio.create_task(gateway.run("trainer-s-1-0", group="train-0"))
        await until(lambda: cluster.all("pods"))
        second = asyncio.create_task(gateway.run("trainer-s-2-0", group="train-1"))
        await until(
            lambda: "trainer-s-1-0, which has several" in waits_for(gateway, "trainer-s-2-0")
        )
        await first
        await gateway.launcher.stop("trainer-s-1-0")
        await second


@on_cluster(nodes=2)
async def test_a_trainer_has_all_its_time_when_one_before_it_was_given_up(cluster):
    async with Gateway(cluster, nodes=2) as gateway:
        gateway.maker.memory = "9Ti"
        first = await started(gateway, "trainer-s-1-0", group="train-0")
        gateway.maker.memory = "64Mi"
        await until(lambda: cluster.all("pods"))
        second = asyncio.create_task(gateway.run("trainer-s-2-0", group="train-1"))
        await gateway.run("trainer-s-3-0", group="other-0")
        gateway.maker.nodes = 1
        await gateway.run("trainer-s-4-0", group="train-2")
        assert not first.done() and not second.done()
        with pytest.raises(WorkerStartFailed, match="was not scheduled within 60 s"):
            await first
        await second


@on_cluster()
async def test_a_reason_from_the_log_has_a_bound(cluster):
    async with Gateway(cluster) as gateway:
        await gateway.run("trainer-s-1-0")
        cluster.logs["trainer-s-1-0"] = "\r".join(f"{step} {'x' * 1500}" for step in range(1000))
        cluster.exit("trainer-s-1-0", code=3)
        await until(lambda: gateway.exits)
        reason = gateway.exits[0][1]
        assert "| 999 x" in reason and "| 990 x" not in reason and len(reason) < 5000


@on_cluster()
async def test_of_pods_that_end_together_that_is_told_which_did_not_end_by_itself(cluster):
    async with Gateway(cluster, nodes=2) as gateway:
        await gateway.run("trainer-s-1-0")
        cluster.report("trainer-s-1-0", "rank 1 was lost")
        cluster.run_out_of_memory("trainer-s-1-0-1")
        await until(lambda: gateway.exits)
        assert "needed more than" in gateway.exits[0][1]


@on_cluster()
async def test_a_worker_that_does_not_end_is_killed_when_its_grace_is_over(cluster):
    async with Gateway(cluster) as gateway:
        await gateway.run("trainer-s-1-0")
        cluster.stubborn.add("trainer-s-1-0")
        before = cluster.now
        await gateway.launcher.stop("trainer-s-1-0")
        assert 5 <= cluster.now - before < 7


@on_cluster()
async def test_a_stop_at_once_shortens_the_grace_of_one_that_was_asked_for(cluster):
    async with Gateway(cluster) as gateway:
        await gateway.run("trainer-s-1-0")
        cluster.stubborn.add("trainer-s-1-0")
        before = cluster.now
        stop = asyncio.create_task(gateway.launcher.stop("trainer-s-1-0"))
        await asyncio.sleep(0.5)
        await gateway.launcher.stop("trainer-s-1-0", at_once=True)
        await stop
        assert cluster.now - before < 5


@on_cluster()
async def test_what_is_not_known_to_be_gone_may_run(cluster):
    async with Gateway(cluster, node_lost=1000) as gateway:
        await gateway.run("trainer-s-1-0")
        cluster.lose_node("node-0")
        stop = asyncio.create_task(gateway.launcher.stop("trainer-s-1-0"))
        await asyncio.sleep(100)
        assert not stop.done()
        assert "node-0 does not answer the control plane" in waits_for(gateway)
        stop.cancel()
        cluster.nodes["node-0"].alive = True
        await gateway.launcher.stop("trainer-s-1-0")
        assert "pods" not in cluster.owned()


@on_cluster()
async def test_what_ends_while_the_launcher_is_closed_may_run(cluster):
    gateway = Gateway(cluster)
    await gateway.open()
    await gateway.run("trainer-s-1-0")
    cluster.stubborn.add("trainer-s-1-0")
    stop = asyncio.create_task(gateway.launcher.stop("trainer-s-1-0"))
    await asyncio.sleep(1)
    await gateway.close()
    with pytest.raises(WorkerMayRun):
        await stop


@on_cluster()
async def test_a_worker_that_cannot_be_killed_on_a_node_that_answers_is_never_forgotten(cluster):
    async with Gateway(cluster) as gateway:
        await gateway.run("trainer-s-1-0")
        ends = asyncio.Event()
        terminate = cluster._terminate

        async def stuck(pod, grace):
            await ends.wait()
            await terminate(pod, grace)

        cluster._terminate = stuck
        stop = asyncio.create_task(gateway.launcher.stop("trainer-s-1-0"))
        await asyncio.sleep(1000)
        assert not stop.done()
        assert "its node node-0 has not said that it has ended" in waits_for(gateway)
        stop.cancel()
        assert "pods" in cluster.owned()
        ends.set()
        await gateway.launcher.stop("trainer-s-1-0")
        assert "pods" not in cluster.owned()


@on_cluster()
async def test_a_worker_that_is_stopped_while_it_starts_leaves_nothing(cluster):
    cluster.images["worker:1"] = Image(pull=100)
    async with Gateway(cluster, idle=0) as gateway:
        start = await started(gateway)
        await until(lambda: cluster.owned().get("pods"))
        await gateway.launcher.stop("trainer-s-1-0", at_once=True)
        with pytest.raises(WorkerStartFailed, match="was stopped while it started"):
            await start
        await until(lambda: not cluster.owned())
