"""Tests of a launcher of pods for any cluster: in memory (`tests/unit`) or real
(`tests/cluster`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import pytest

from tandem.errors import SuspendFailed, WorkerStartFailed
from tests.support.kubernetes.gateway import Gateway, spec, until


class Stage(Protocol):
    """A cluster with at least two nodes, each with two devices of `device_class`."""

    def gateway(self, *, epoch: int = 1, **settings: float) -> Gateway:
        """Return a gateway. Its workers only do the actions in `maker.lives`."""
        ...

    async def left(self) -> dict[str, list[str]]:
        """Return the names of all objects made by gateways, by kind."""
        ...

    async def delete_pod(self, name: str) -> None: ...


async def a_worker_starts_serves_and_leaves_nothing(stage: Stage) -> None:
    gateway = stage.gateway(idle=0)
    assert await gateway.open() == []
    handle = await gateway.run("trainer-s-1-0")
    assert handle.address.endswith(":7300")
    assert gateway.launcher.reports
    assert await stage.left() == {
        "pods": ["trainer-s-1-0"],
        "secrets": ["trainer-s-1-0"],
        "resourceclaims": ["tandem-train-0"],
    }
    await gateway.launcher.stop("trainer-s-1-0")
    await nothing_left(stage)
    assert gateway.exits == []
    await gateway.close()


async def the_own_reason_of_a_worker_that_ends_is_told(stage: Stage) -> None:
    gateway = stage.gateway(idle=0)
    gateway.maker.lives["trainer-s-1-0"] = "report"
    await gateway.open()
    await gateway.run("trainer-s-1-0")
    await until(lambda: gateway.exits)
    assert gateway.exits == [("trainer-s-1-0", "the weights are not finite")]
    await nothing_left(stage)
    await gateway.close()


async def the_last_lines_of_the_log_are_told_without_the_secret(stage: Stage) -> None:
    gateway = stage.gateway(idle=0)
    gateway.maker.lives["trainer-s-1-0"] = "exit"
    await gateway.open()
    await gateway.run("trainer-s-1-0")
    await until(lambda: gateway.exits)
    assert gateway.exits[0][1] == (
        "the trainer exited with status 3; the last lines of its log: "
        "begun | (secret) | KeyError: w"
    )
    await nothing_left(stage)
    await gateway.close()


async def a_worker_that_needs_too_much_memory_is_told_the_setting(stage: Stage) -> None:
    gateway = stage.gateway(idle=0)
    gateway.maker.lives["trainer-s-1-0"] = "memory"
    await gateway.open()
    await gateway.run("trainer-s-1-0")
    await until(lambda: gateway.exits)
    assert gateway.exits[0][1] == (
        "the trainer needed more than the 64Mi that its pod may have; tandem.host_memory raises "
        "that"
    )
    await nothing_left(stage)
    await gateway.close()


async def a_pod_that_somebody_deletes_is_an_end(stage: Stage) -> None:
    gateway = stage.gateway(idle=0)
    await gateway.open()
    await gateway.run("trainer-s-1-0")
    await stage.delete_pod("trainer-s-1-0")
    await until(lambda: gateway.exits)
    assert gateway.exits == [("trainer-s-1-0", "the trainer's pod was deleted, not by the gateway")]
    await nothing_left(stage)
    await gateway.close()


async def what_a_pod_waits_for_is_said_and_has_an_end(stage: Stage) -> None:
    gateway = stage.gateway(idle=0, pending_timeout=6)
    gateway.maker.memory = "9Ti"
    await gateway.open()
    await fails(gateway, says="Insufficient memory", told="was not scheduled within 6 s")
    await nothing_left(stage)
    await gateway.close()


async def too_many_devices_are_said(stage: Stage) -> None:
    gateway = stage.gateway(idle=0, pending_timeout=6)
    gateway.maker.devices = 31
    await gateway.open()
    await fails(gateway, says="cannot allocate all claims", told="was not scheduled within 6 s")
    await nothing_left(stage)
    await gateway.close()


async def an_unknown_device_class_is_said(stage: Stage) -> None:
    gateway = stage.gateway(idle=0, pending_timeout=6)
    gateway.maker.device_class = "gpu.elsewhere"
    await gateway.open()
    said = "device class gpu.elsewhere does not exist"
    await fails(gateway, says=said, told=said)
    await nothing_left(stage)
    await gateway.close()


async def a_fault_in_a_selector_fails_at_once(stage: Stage) -> None:
    gateway = stage.gateway(idle=0, pending_timeout=1000)
    gateway.maker.selectors = ["device.attributes['gpu.nvidia.com'].missing == 'x'"]
    await gateway.open()
    await fails(gateway, says="", told="no such key: missing")
    await nothing_left(stage)
    await gateway.close()


async def what_the_api_server_refuses_is_said(stage: Stage) -> None:
    gateway = stage.gateway(idle=0)
    gateway.maker.selectors = ["("]
    await gateway.open()
    await fails(gateway, says="", told="refuses its ResourceClaim.*compilation failed")
    gateway.maker.selectors = []
    gateway.maker.extra = {"hostnmae": "x"}
    await fails(gateway, says="", told="refuses its Pod.*hostnmae")
    await nothing_left(stage)
    await gateway.close()


async def an_image_that_is_not_there_is_said_and_has_time_of_its_own(stage: Stage) -> None:
    gateway = stage.gateway(idle=0, pull_timeout=8, pending_timeout=1000)
    gateway.maker.image = "127.0.0.1:1/nothing:1"
    await gateway.open()
    said = "the image 127.0.0.1:1/nothing:1: ErrImagePull"
    await fails(gateway, says=said, told="did not run within 8 s: .*nothing:1: ErrImagePull")
    await nothing_left(stage)
    await gateway.close()


async def the_next_gateway_adopts_what_runs_and_removes_what_began(stage: Stage) -> None:
    first = stage.gateway(epoch=1)
    await first.open()
    handle = await first.run("trainer-s-1-0")
    first.maker.memory = "9Ti"
    begun = asyncio.create_task(first.launcher.start(spec("trainer-s-2-0")))
    await until(lambda: "Insufficient memory" in first.launcher.explain("trainer-s-2-0"))
    begun.cancel()
    await first.die()
    second = stage.gateway(epoch=2, idle=0)
    assert await second.open() == [handle]
    await second.launcher.stop("trainer-s-2-0", at_once=True)
    assert (await stage.left())["pods"] == ["trainer-s-1-0"]
    await second.launcher.stop("trainer-s-1-0")
    await nothing_left(stage)
    assert second.exits == []
    await second.close()


async def workers_share_a_claim_which_goes_when_it_is_idle(stage: Stage) -> None:
    gateway = stage.gateway(idle=4)
    await gateway.open()
    names = [f"sampler-s-{number}-0" for number in range(4)]
    await asyncio.gather(*(gateway.run(name, kind="sampler") for name in names))
    left = await stage.left()
    assert left["pods"] == names
    assert left["resourceclaims"] == ["tandem-train-0"]
    for name in names[1:]:
        await gateway.launcher.stop(name, at_once=True)
    assert (await stage.left())["resourceclaims"] == ["tandem-train-0"]
    await gateway.launcher.stop(names[0])
    assert (await stage.left())["resourceclaims"] == ["tandem-train-0"]
    await nothing_left(stage)
    await gateway.close()


async def a_trainer_of_two_nodes_has_a_pod_and_a_claim_on_each(stage: Stage) -> None:
    gateway = stage.gateway(idle=0, nodes=2)
    await gateway.open()
    await gateway.run("trainer-s-1-0")
    assert await stage.left() == {
        "pods": ["trainer-s-1-0", "trainer-s-1-0-1"],
        "secrets": ["trainer-s-1-0"],
        "services": ["trainer-s-1-0"],
        "networkpolicies": ["trainer-s-1-0"],
        "resourceclaims": ["tandem-train-0-0", "tandem-train-0-1"],
    }
    await stage.delete_pod("trainer-s-1-0-1")
    await until(lambda: gateway.exits)
    await nothing_left(stage)
    await gateway.close()


async def a_worker_that_ignores_its_end_is_killed(stage: Stage) -> None:
    gateway = stage.gateway(idle=0)
    gateway.maker.lives["trainer-s-1-0"] = "stubborn"
    await gateway.open()
    await gateway.run("trainer-s-1-0")
    await gateway.launcher.stop("trainer-s-1-0")
    await nothing_left(stage)
    await gateway.close()


async def a_worker_that_is_stopped_while_it_starts_leaves_nothing(stage: Stage) -> None:
    gateway = stage.gateway(idle=0)
    gateway.maker.memory = "9Ti"
    await gateway.open()
    start = asyncio.create_task(gateway.launcher.start(spec("trainer-s-1-0")))
    await until(lambda: gateway.launcher.explain("trainer-s-1-0"))
    await gateway.launcher.stop("trainer-s-1-0", at_once=True)
    with pytest.raises(WorkerStartFailed, match="was stopped while it started"):
        await start
    await nothing_left(stage)
    await gateway.close()


async def a_pod_cannot_be_suspended_from_outside(stage: Stage) -> None:
    gateway = stage.gateway(idle=0)
    await gateway.open()
    with pytest.raises(SuspendFailed, match="moved off its devices from outside"):
        await gateway.launcher.suspend("trainer-s-1-0", lease=1, timeout=1)
    await gateway.close()


async def ten_sessions_at_once_come_and_go(stage: Stage) -> None:
    gateway = stage.gateway(idle=0)
    await gateway.open()
    names = [f"sampler-s-{number}-0" for number in range(10)]
    await asyncio.gather(
        *(gateway.run(n, kind="sampler", group=f"train-{i % 2}") for i, n in enumerate(names))
    )
    assert (await stage.left())["pods"] == names
    await asyncio.gather(*(gateway.launcher.stop(name, at_once=True) for name in names))
    await nothing_left(stage)
    await gateway.close()


async def fails(gateway: Gateway, *, says: str, told: str) -> None:
    """Start a worker that first waits for `says` and then fails because of `told`."""
    start = asyncio.create_task(gateway.launcher.start(spec("trainer-s-1-0")))
    if says:
        await until(lambda: says in gateway.launcher.explain("trainer-s-1-0") or start.done())
        assert not start.done() or says in str(start.exception())
    with pytest.raises(WorkerStartFailed, match=told):
        await start


async def nothing_left(stage: Stage) -> None:
    for _ in range(600):
        if not (left := await stage.left()):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"left: {left}")


BODY: list[Callable[[Stage], Awaitable[None]]] = [
    a_worker_starts_serves_and_leaves_nothing,
    the_own_reason_of_a_worker_that_ends_is_told,
    the_last_lines_of_the_log_are_told_without_the_secret,
    a_worker_that_needs_too_much_memory_is_told_the_setting,
    a_pod_that_somebody_deletes_is_an_end,
    what_a_pod_waits_for_is_said_and_has_an_end,
    too_many_devices_are_said,
    an_unknown_device_class_is_said,
    a_fault_in_a_selector_fails_at_once,
    what_the_api_server_refuses_is_said,
    an_image_that_is_not_there_is_said_and_has_time_of_its_own,
    the_next_gateway_adopts_what_runs_and_removes_what_began,
    workers_share_a_claim_which_goes_when_it_is_idle,
    a_trainer_of_two_nodes_has_a_pod_and_a_claim_on_each,
    a_worker_that_ignores_its_end_is_killed,
    a_worker_that_is_stopped_while_it_starts_leaves_nothing,
    a_pod_cannot_be_suspended_from_outside,
    ten_sessions_at_once_come_and_go,
]
