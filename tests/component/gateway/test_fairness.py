"""Owners take turns.

The tests count earlier dispatches of other owners."""

from __future__ import annotations

import asyncio

from sqlalchemy import insert, select

from gateway.owners.auth.keys import NewKey
from gateway.runs.dispatcher import DISPATCH_WINDOW
from gateway.runs.operations import AdamParams, OptimStep
from gateway.storage.database import _MAX_BATCH, Database
from gateway.storage.fair_queue import FairQueue, FairSemaphore
from gateway.storage.tables import models
from tests.support.gateway.requests import create_run
from tests.support.gateway.running import forward_backward_bytes, running_gateway
from tests.support.waiting import until, wait_until

FLOOD = 1000


def test_owners_take_turns_and_each_is_served_in_its_own_order():
    queue: FairQueue[str] = FairQueue()
    for owner, thing in [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1")]:
        queue.put(owner, thing)
    assert queue
    assert [queue.take() for _ in range(2)] == ["a1", "b1"]
    queue.put("b", "b2")
    assert [queue.take() for _ in range(4)] == ["c1", "a2", "b2", "a3"]
    assert not queue


def test_a_gate_lets_owners_in_by_turns_and_survives_one_that_gives_up():
    async def order() -> list[str]:
        gate, asked, seen = FairSemaphore(slots=1), [], []
        release = asyncio.Event()

        async def pass_through(owner: str) -> None:
            asked.append(owner)
            async with gate.turn(owner):
                await release.wait()
                seen.append(owner)

        tasks = [asyncio.create_task(pass_through("ann")) for _ in range(5)]
        await until(lambda: len(asked) == 5)
        tasks.append(asyncio.create_task(pass_through("bea")))
        await until(lambda: len(asked) == 6)
        tasks[1].cancel()
        release.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        return seen

    seen = asyncio.run(order())
    assert seen.index("bea") <= 2
    assert seen.count("ann") == 4


def test_a_transaction_has_something_of_every_owner(tmp_path):
    async def committed_before() -> int:
        database = Database(url="", data_dir=tmp_path)
        await database.open()

        def write(name: str, owner: str) -> asyncio.Task[None]:
            row = {"name": name, "path": "/", "added_at": 0.0}
            # As a payload of 4 MB: eight of them fill a transaction.
            return asyncio.create_task(
                database.write(insert(models), row, owner=owner, size=4 * 2**20)
            )

        flood = [write(f"ann-{n}", "ann") for n in range(FLOOD)]  # tasks begin in this order
        await write("bea", "bea")
        before = sum(task.done() for task in flood)
        await asyncio.gather(*flood)
        assert len(await database.read(select(models.c.name))) == FLOOD + 1
        await database.close()
        return before

    assert asyncio.run(committed_before()) <= 2 * 8


def test_a_single_operation_goes_within_one_round_of_a_flood(tmp_path):
    """One owner sends 1000 operations before another sends one."""
    with running_gateway(tmp_path, session_ttl=600, sequence_gap_timeout=600, long_poll=20) as gate:
        gateway = gate.gateway
        order: list[str] = []
        owners = {"ann": _owner(gate, "ann"), "bea": _owner(gate, "bea")}
        for name, session_id, _run_id in owners.values():
            _id, trainer = gate.worker(f"trainer-{session_id}")
            trainer.requests = _Noted(order, name)
        accepted: list[str] = []

        async def submit(name: str, seq_id: int) -> None:
            await _submit(gateway, owners[name][2], seq_id)
            accepted.append(name)

        async def flood() -> None:
            tasks = [asyncio.create_task(submit("ann", seq)) for seq in range(1, FLOOD + 1)]
            tasks.append(asyncio.create_task(submit("bea", 1)))
            await asyncio.gather(*tasks)

        # Ann's trainer does nothing until Bea's step is done. So the counts below do not depend on
        # the time of a transaction or a step.
        _id, busy = gate.worker(f"trainer-{owners['ann'][1]}")
        gate.run(busy.gate.clear)
        gate.run(flood())
        assert accepted.index("bea") <= _MAX_BATCH + 1  # one transaction under way, and one round
        wait_until(lambda: order == ["bea"])
        anns = gateway.runs.get(owners["ann"][2]).dispatcher
        assert anns.under_way <= DISPATCH_WINDOW  # all her earlier ones
        gate.run(busy.gate.set)
        wait_until(lambda: len(order) == FLOOD + 1)


def _owner(gate, name: str) -> tuple[str, str, str]:
    _key, secret = gate.run(gate.gateway.keys.create(NewKey(owner=name, role="member")))
    session_id = gate.session_id(secret)
    with gate.http(secret) as client:
        run_id = create_run(client, session_id).json()["model_id"]
    wait_until(lambda: gate.gateway.runs.get(run_id).state == "ready")
    return name, session_id, run_id


class _Noted(list):
    """Notes a worker's requests in a shared list."""

    def __init__(self, order: list[str], what: str) -> None:
        super().__init__()
        self._order, self._what = order, what

    def append(self, request) -> None:
        self._order.append(self._what)


def _submit(gateway, run_id: str, seq_id: int):
    return gateway.admission.submit(
        run_id=run_id,
        seq_id=seq_id,
        kind="optim_step",
        body=OptimStep(params=AdamParams()),
        request=b"{}",
    )


def test_large_payloads_do_not_fill_the_window_of_a_trainer(tmp_path):
    """Payloads under way are in memory."""
    changes = {"session_ttl": 600, "dispatch_window_bytes": 2**20}
    with running_gateway(tmp_path, **changes) as gate, gate.http() as client:
        run_id = gate.run_id(gate.session_id())
        _, trainer = gate.worker("trainer")
        gate.run(trainer.gate.clear)
        size = 700_000
        padding = b"\x82\x7d" + _varint(size) + bytes(size)
        for seq in (1, 2, 3):
            client.post(
                "/api/v1/forward_backward",
                content=forward_backward_bytes(run_id, seq) + padding,
                headers={"Content-Type": "application/x-protobuf"},
            )
        dispatcher = gate.gateway.runs.get(run_id).dispatcher
        wait_until(lambda: dispatcher.under_way == 1)
        assert dispatcher.queued == 3
        gate.run(trainer.gate.set)
        wait_until(lambda: dispatcher.queued == 0)
        assert [seq for _, seq in trainer.applied] == [1, 2, 3]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
