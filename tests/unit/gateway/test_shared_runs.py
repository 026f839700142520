"""Runs that share a trainer: leftovers of runs that never began, and isolation of owners."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from gateway.api.tandem.status import status
from gateway.core import Gateway
from gateway.owners.auth.identity import Caller
from gateway.owners.sessions.registry import NewSession
from gateway.runs.recovery.resumption import RunResumption
from tandem.errors import StorageFailed
from tests.support.gateway.crash_client import Client, batch, publish, step
from tests.support.gateway.crash_scenarios import Life, Scenario


class SecondIsNotCreated(Scenario):
    """The first session ends while the second run's row is written. Then the second ends, or its
    write fails."""

    how = ""

    async def _serve(self, gateway: Gateway, client: Client) -> None:
        if client is not self._clients[0]:
            return
        await client.go_on(gateway)
        writing, goes_on = asyncio.Event(), asyncio.Event()
        write = gateway.database.write_together

        async def slowly(*statements, **options) -> None:
            if self.how == "ends":
                await write(*statements, **options)
            writing.set()
            await goes_on.wait()
            if self.how == "fails":
                raise StorageFailed("the disk is full")

        with patch.object(gateway.database, "write_together", slowly):
            second = asyncio.create_task(self._clients[1].go_on(gateway))
            await writing.wait()
            await self._end(gateway, client)
            if self.how == "ends":
                await self._end(gateway, self._clients[1])
            goes_on.set()
            await asyncio.wait({second})
        if self.how == "fails":
            assert isinstance(second.exception(), StorageFailed)
            await self._end(gateway, self._clients[1])
        await asyncio.sleep(60)

    async def _end(self, gateway: Gateway, client: Client) -> None:
        await gateway.end_session(
            session_id=client.session_id, state="finished", reason="finished", detail=""
        )


@pytest.mark.parametrize("how", ["ends", "fails"])
def test_the_last_run_of_a_trainer_gives_it_back_though_it_was_never_created(how, tmp_path):
    scenario = SecondIsNotCreated([batch(1), step()], tmp_path / "data", beside=[[]])
    scenario.how = how
    scenario.run_all()  # it checks that no place or process is left
    assert [e for e in scenario.log if e["event"] == "worker_ready"], "there was a process"


def test_a_run_that_cannot_be_resumed_leaves_the_trainer_to_the_others(tmp_path: Path):
    resume, failed = RunResumption.resume_run, []

    async def fails_once(self, run, left):
        if not failed:
            failed.append(run.id)
            raise ValueError("a row that nobody understands")
        return await resume(self, run, left)

    class OneIsLost(Scenario):
        async def _serve(self, gateway: Gateway, client: Client) -> None:
            if client.run_id not in failed:
                await super()._serve(gateway, client)
                return
            self.log[:] = [e for e in self.log if e["event"] != "run_not_resumed"]  # expected here
            await gateway.end_session(
                session_id=client.session_id, state="finished", reason="finished", detail=""
            )

    script = [batch(1), step(), batch(2), step()]
    scenario = OneIsLost(
        script, tmp_path / "data", beside=[script], lives=[Life(250, outlived=True)]
    )
    with patch.object(RunResumption, "resume_run", fails_once):
        scenario.run_all()
    assert failed


def test_of_what_owners_share_each_sees_whose_it_is_if_it_is_its_own(tmp_path: Path):
    seen: dict[str, str] = {}

    class TwoOwners(Scenario):
        async def _serve(self, gateway: Gateway, client: Client) -> None:
            if client is not self._clients[0]:
                return
            for name, each in zip(("ann", "ben"), self._clients, strict=True):
                new = NewSession(owner=name, sdk_version="0.38.0")
                each.session_id = (await gateway.sessions.create(new)).id
                await each.go_on(gateway)
            for name, role in (("ann", "member"), ("ben", "member"), ("root", "admin")):
                access: Any = SimpleNamespace(gateway=gateway, caller=Caller(name, "k", role))
                found = await status(access)
                assert len(found.workers) == 2 and len(found.samplers) == 1
                seen[name] = found.model_dump_json()
            for each in self._clients:
                await gateway.end_session(
                    session_id=each.session_id, state="finished", reason="finished", detail=""
                )

    script = [batch(1), step(), publish(0)]
    scenario = TwoOwners(
        script,
        tmp_path / "data",
        beside=[script],
        settings={"sharing": {"lora_runs": "always", "across_owners": True}},
    )
    scenario.run_all()
    ann, ben = (each.session_id for each in scenario._clients)
    assert f"trainer-{ann}-" in seen["ann"] and ben not in seen["ann"]
    assert '"worker":"trainer"' in seen["ben"] and ann not in seen["ben"]
    assert ann in seen["root"] and ben in seen["root"]
