"""Pools of claims become device groups. Placed workers can be scheduled."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import kubernetes.aio.client  # noqa: F401 - binds a port at its import, to see what there is
import pytest

from gateway.workers.declared_groups import budgets_of, groups_of
from gateway.workers.launchers.kubernetes.home import Home
from gateway.workers.launchers.kubernetes.objects import render_worker
from gateway.workers.launchers.kubernetes.resources import resources_of
from gateway.workers.launchers.kubernetes.templates import Object, read_templates
from gateway.workers.run_options import RunOptions, options_of
from gateway.workers.table import WorkerRow
from tandem.agent.host import Host
from tandem.errors import InvalidRequest
from tandem.protocol.worker import TrainingSpec, WorkerSpec
from tandem.settings.gateway import GatewaySettings
from tandem.settings.workers import TrainerSettings
from tests.support.gateway.supervised_places import PlacedRun, PlacesWorld
from tests.support.waiting import PATIENCE

GIB = 2**30
BOTH = ["trainer", "sampler"]
GPUS = {"name": "gpu", "roles": BOTH, "device_class": "gpu.nvidia.com"}
TRAIN = {"name": "train", "roles": ["trainer"], "device_class": "gpu.nvidia.com"}
SAMPLE = {"name": "sample", "roles": ["sampler"], "device_class": "gpu.nvidia.com"}
CPUS = {"name": "cpu", "roles": BOTH}


def pods(*pools: dict[str, object], placement="shared", **settings) -> GatewaySettings:
    kubernetes = {"placement": placement, "trainer_image": "t", "sampler_image": "s"}
    about = {"launcher": "kubernetes", "claim_pools": list(pools), "kubernetes": kubernetes}
    return GatewaySettings(**about | settings)


def groups(*pools: dict[str, object], **settings):
    return groups_of(pods(*pools, **settings), Host())


# --- Groups ---------------------------------------------------------------------------------------


def test_each_claim_of_a_pool_is_a_group_whose_pods_number_its_devices_anew():
    first, second, other = groups(
        GPUS | {"claims": 2, "devices": 2, "memory_bytes": 80 * GIB, "workers": 3}, CPUS
    )
    assert (first.name, second.name, other.name) == ("gpu-0", "gpu-1", "cpu-0")
    for each in (first, second):
        assert [str(device) for device in each.devices] == ["cuda:0", "cuda:1"]
    assert (first.workers, first.awake, first.device_bytes) == (3, 1, 80 * GIB)


def test_a_pool_without_claims_has_leases_all_the_same():
    (group,) = groups(CPUS | {"awake": 1, "workers": 4, "devices": 2})
    assert (group.devices, group.leased, group.workers) == ((), True, 4)
    assert group.pool
    assert group.has_devices_for(2)
    assert not group.has_devices_for(3)


def test_workers_beside_claims_of_something_else_than_gpus_compute_on_the_cpu():
    (group,) = groups(GPUS | {"device_class": "cpu.example.com", "compute": "cpu", "devices": 2})
    assert (group.devices, group.leased) == ((), True)
    assert group.has_devices_for(2)


def test_ranks_are_divided_equally_among_the_nodes_that_they_need():
    (group,) = [g for g in groups(TRAIN | {"devices": 4, "nodes": 3}, CPUS) if g.pool == "train"]
    possible = [ranks for ranks in range(1, 16) if group.has_devices_for(ranks)]
    assert possible == [1, 2, 3, 4, 6, 8, 9, 12]
    of_six = [str(each) for each in group.devices_for(6)]
    assert of_six == ["cuda:0", "cuda:1", "cuda:2"] * 2
    assert "3 nodes with 4 devices each" in group.describe_devices()


def test_an_engine_may_have_all_devices_of_a_claim():
    settings = pods(TRAIN, SAMPLE | {"devices": 2})
    there = groups_of(settings, Host())

    def asked(ranks: int) -> RunOptions:
        metadata = {"tandem.sampler_ranks": str(ranks)}
        return options_of(
            metadata,
            None,
            model="tiny",
            settings=settings,
            groups=there,
            admin=False,
            training=TrainingSpec(),
        )

    assert asked(2).sampler_ranks == 2
    with pytest.raises(InvalidRequest, match=r"an engine on 4 devices .* there is: sample \(2 dev"):
        asked(4)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (lambda: pods(), 'TANDEM_CLAIM_POOLS: no pool has "sampler" among its roles'),
        (lambda: pods(TRAIN), 'no pool has "sampler" among its roles'),
        (lambda: pods(CPUS, CPUS), "TANDEM_CLAIM_POOLS: 2 pools have the name 'cpu'"),
        (lambda: pods(GPUS, placement="strict"), "pool 'gpu' is for trainers and samplers"),
        (lambda: pods(CPUS, launcher="agent"), "pools need TANDEM_LAUNCHER=kubernetes"),
        (
            lambda: pods(CPUS, groups=[{"name": "a", "devices": ["cpu:0"], "roles": BOTH}]),
            "TANDEM_GROUPS: pods need the pools of TANDEM_CLAIM_POOLS instead",
        ),
    ],
)
def test_pools_that_cannot_be_are_refused_with_what_is_wrong(settings, fault):
    with pytest.raises(InvalidRequest, match=fault):
        groups_of(settings(), Host())


def test_a_pool_that_makes_no_claim_may_have_both_roles_on_nodes_of_their_own():
    assert groups(CPUS, placement="strict")


def test_pods_do_not_share_the_memory_of_the_gateway_s_host():
    host = Host(memory_bytes=100 * GIB)
    assert budgets_of(pods(CPUS, host_memory_bytes=GIB), host).host_bytes == 0
    assert budgets_of(GatewaySettings(), host).host_bytes == 90 * GIB


# --- Places ---------------------------------------------------------------------------------------


async def room(*pools: dict[str, object]) -> PlacesWorld:
    return await PlacesWorld(*groups(*pools)).open()


async def placed(there: PlacesWorld, number: int, **options: object) -> list[str] | str:
    """Place a run with its sampler. Return their groups, or the reason against it."""
    run = await there.run(run_id=f"run-{number}", **options).ask()
    if not run.has:
        return run.why
    rows = there.supervisor.roster.rows
    return [rows[key].group for key in (run.key, run.sampler)]


async def test_workers_use_the_claims_that_there_are_before_another_one_is_made():
    there = await room(GPUS | {"claims": 3, "workers": 4})
    used = [set(await placed(there, number)) for number in range(6)]
    assert used == [{"gpu-0"}] * 2 + [{"gpu-1"}] * 2 + [{"gpu-2"}] * 2
    assert "4 workers are there (TANDEM_CLAIM_POOLS workers)" in await placed(there, 6)


async def test_a_session_may_ask_for_a_pool_or_for_a_certain_claim():
    there = await room(GPUS | {"claims": 2, "workers": 2}, CPUS)
    assert await placed(there, 0, group="gpu", sampler_group="cpu") == ["gpu-0", "cpu-0"]
    assert await placed(there, 1, group="gpu-1", sampler_group="gpu") == ["gpu-1", "gpu-0"]


def test_what_no_pool_gives_is_said_of_the_pools_and_not_of_each_claim():
    settings = pods(TRAIN | {"claims": 50}, SAMPLE | {"claims": 50}, placement="strict")
    about = {"model": "m", "settings": settings, "groups": groups_of(settings, Host())}
    for asked in ({"tandem.ranks": 7}, {"tandem.group": "elsewhere"}):
        with pytest.raises(InvalidRequest) as raised:
            options_of(asked, None, admin=False, training=TrainingSpec(), **about)
        assert raised.value.message.count("train") < 5


async def test_a_claim_takes_no_more_workers_than_its_node_has_memory_for():
    there = await room(GPUS | {"claims": 2, "node_memory_bytes": 48 * GIB})
    sizes = {"host_memory": "20GiB", "sampler_host_memory": "20GiB"}
    assert await placed(there, 0, **sizes) == ["gpu-0", "gpu-0"]
    assert await placed(there, 1, **sizes) == ["gpu-1", "gpu-1"]
    assert (
        "it needs 20 GiB of its node's memory, and workers have 40 GiB of 48 GiB on group gpu-0"
    ) in await placed(there, 2, **sizes)


# --- Scheduling -----------------------------------------------------------------------------------


class Cluster:
    """Hosts of a cluster with memory and devices, and a scheduler like that of Kubernetes. It looks
    at requests, claims and the node selector."""

    def __init__(self, hosts: dict[str, dict[str, str]], *, memory: int, devices: int) -> None:
        self.labels = hosts
        self.memory = dict.fromkeys(hosts, memory)
        self.devices = dict.fromkeys(hosts, devices)
        self.allocated: dict[str, tuple[str, int]] = {}
        self.pods: dict[str, tuple[str, Object]] = {}
        self.random = random.Random(7)

    def schedule(self, pod: Object, claims: dict[str, int]) -> bool:
        """Bind a pod to a host; False: it is pending."""
        fits = [name for name in self.labels if self._fits(pod, claims, name)]
        if not fits:
            return False
        host = self.random.choice(fits)
        for claim, devices in claims.items():
            if claim not in self.allocated:
                self.allocated[claim] = (host, devices)
                self.devices[host] -= devices
        self.memory[host] -= _memory(pod)
        self.pods[pod["metadata"]["name"]] = (host, pod)
        return True

    def _fits(self, pod: Object, claims: dict[str, int], host: str) -> bool:
        selected = pod["spec"].get("nodeSelector", {}).items() <= self.labels[host].items()
        here = all(self.allocated.get(claim, (host, 0))[0] == host for claim in claims)
        free = [n for claim, n in claims.items() if claim not in self.allocated]
        return (
            selected
            and here
            and sum(free) <= self.devices[host]
            and _memory(pod) <= self.memory[host]
        )

    def end(self, name: str) -> None:
        host, pod = self.pods.pop(name)
        self.memory[host] += _memory(pod)
        left = Counter(claim for _, each in self.pods.values() for claim in _claims(each))
        for claim in _claims(pod):
            if not left[claim]:  # Kubernetes clears the allocation with the last pod
                self.devices[host] += self.allocated.pop(claim)[1]


def _memory(pod: Object) -> int:
    return sum(int(each["resources"]["requests"]["memory"]) for each in pod["spec"]["containers"])


def _claims(pod: Object) -> list[str]:
    return [each["resourceClaimName"] for each in pod["spec"].get("resourceClaims", [])]


class Experiment:
    """A session that needs a trainer and a sampler at once."""

    def __init__(self, placed: PlacedRun, *, settings: GatewaySettings, cluster: Cluster):
        self.placed, self.settings, self.cluster = placed, settings, cluster

    async def run(self) -> None:
        await self.placed.take()
        rows = self.placed.supervisor.roster.rows
        trainer, served = rows[self.placed.key], rows[self.placed.sampler]
        assert served.group, "it has half of what it needs"
        for row in (trainer, served):
            await asyncio.sleep(0)  # others start theirs meanwhile
            assert self.starts(row), "its pod is pending though it has a place"
        for _ in range(5):
            await asyncio.sleep(0)
        for row in (served, trainer):
            self.cluster.end(self.name_of(row))
        self.placed.end()

    def starts(self, row: WorkerRow) -> bool:
        settings = self.settings
        group = self.placed.supervisor.roster.groups[row.group]
        pool = next(pool for pool in settings.claim_pools if pool.name == group.pool)
        role = "trainer" if row.kind == "trainer" else "sampler"
        spec = WorkerSpec(
            worker_id=self.name_of(row),
            kind=role,
            secret="",
            model_name="m",
            model_path="m",
            session_id=row.session,
            group=group.name,
            devices=group.devices_for(row.request.ranks),
            host_memory=row.request.host_bytes,
            trainer=TrainerSettings() if role == "trainer" else None,
        )
        objects = render_worker(
            spec,
            pool=pool,
            template=read_templates(settings.kubernetes)[role],
            resources=resources_of(spec, pool=pool, settings=settings),
            home=Home(settings=settings.kubernetes, namespace="n", volume=Path("/data"), epoch=1),
        )
        claims = {each["metadata"]["name"]: pool.devices for each in objects.claims}
        return all(self.cluster.schedule(pod, claims) for pod in objects.pods)

    @staticmethod
    def name_of(row: WorkerRow) -> str:
        return f"{row.kind}-{row.key}"


ONE_ROLE = {"tandem.dev/role": "trainer"}, {"tandem.dev/role": "sampler"}
NODE, HALF_NODE = {"node_memory_bytes": 48 * GIB}, {"node_memory_bytes": 24 * GIB}


@pytest.mark.parametrize(
    ("pools", "placement", "hosts", "devices"),
    [
        ([GPUS | NODE | {"claims": 2}], "shared", {"a": {}, "b": {}}, 1),
        (
            [TRAIN | NODE | {"claims": 2}, SAMPLE | NODE],
            "strict",
            {"a": ONE_ROLE[0], "b": ONE_ROLE[0], "c": ONE_ROLE[1]},
            1,
        ),
        ([GPUS | HALF_NODE | {"claims": 4}], "shared", {"a": {}, "b": {}}, 2),
        ([CPUS | NODE | {"claims": 2}], "strict", {"a": ONE_ROLE[0], "b": ONE_ROLE[1]}, 0),
    ],
    ids=["a claim each", "roles apart", "two claims on a host", "without devices"],
)
async def test_workers_of_16_gib_on_hosts_of_48_gib_all_get_done(pools, placement, hosts, devices):
    """No pod waits for memory whose holder waits for more. Trainer and sampler get their places at
    one moment, and only where the node has memory for both."""
    settings = pods(*pools, placement=placement)
    cluster = Cluster(hosts, memory=48 * GIB, devices=devices)
    world = await PlacesWorld(*groups_of(settings, Host())).open()
    sizes = {"host_memory": 16 * GIB, "sampler_host_memory": 16 * GIB}
    experiments = [
        Experiment(world.run(**sizes), settings=settings, cluster=cluster) for _ in range(20)
    ]
    await asyncio.wait_for(asyncio.gather(*(each.run() for each in experiments)), PATIENCE)
    assert not cluster.pods
    assert set(cluster.memory.values()) == {48 * GIB}


def test_pods_may_have_the_backends_of_the_settings_and_of_the_gateway_itself():
    defaults = {"m": {"backend": "of-a-model"}}
    settings = pods(GPUS, trainer={"backend": "of-all"}, model_defaults=defaults)
    (group,) = {each.family: each for each in groups_of(settings, Host())}.values()
    assert {"fsdp2", "of-all", "of-a-model"} <= group.backends.keys()
    assert "other" not in group.backends
