"""LoRA runs of one base model share trainers by default."""

from __future__ import annotations

import asyncio
import threading
from types import MappingProxyType

import httpx
from tinker import types

from gateway.owners.auth.keys import NewKey
from tandem.errors import OutOfMemory
from tandem.settings.sharing import MOST_RUNS
from tandem.v1 import trainer_pb2
from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.gateway.fake_trainer import FakeTrainer, die
from tests.support.gateway.requests import finish
from tests.support.gateway.running import KEY, forward_backward_bytes
from tests.support.gateway.runs import OFTEN, PROTO, SELDOM, Run, run_of, train, undisturbed
from tests.support.waiting import PATIENCE, wait_until

MANY = 100


def trained(runs: list[Run]) -> list[Run]:
    """Make one step more in each run than in the one before it."""
    for steps, run in enumerate(runs, start=1):
        train(run, *range(1, steps + 1))
    return runs


def nothing_is_left(gate) -> bool:
    gateway = gate.gateway
    kept = (gateway.supervisor.roster.rows, gateway.runs.all(), gateway.samplers.all())
    return not any(kept) and not gate.launcher.serving


class Experiment:
    """A session with a LoRA run that makes a step and a sample, over HTTP."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.session = self.run = ""

    async def begin(self) -> None:
        created = await self._post("create_session", tags=[], sdk_version="test")
        self.session = created["session_id"]
        run = {"session_id": self.session, "model_seq_id": 0, "base_model": "tiny"}
        await self._done(await self._post("create_model", **run, lora_config={"rank": 8}))
        self.run = f"{self.session}:train:0"

    async def step(self) -> None:
        body = forward_backward_bytes(self.run, 1)
        batch = await self._client.post("/api/v1/forward_backward", content=body, headers=PROTO)
        await self._done(batch.json())
        step = await self._post("optim_step", model_id=self.run, seq_id=2, adam_params={})
        assert (await self._done(step)).json()["metrics"]["grad_norm"] == 1.5

    async def sample(self) -> None:
        saved = {"model_id": self.run, "seq_id": 3, "sampling_session_seq_id": 0}
        await self._done(await self._post("save_weights_for_sampler", **saved))
        sampled = await self._post(
            "asample",
            sampling_session_id=f"{self.session}:sample:0",
            seq_id=0,
            prompt={"chunks": [{"tokens": [1, 2, 3]}]},
            sampling_params={"max_tokens": 2},
        )
        answer = await self._done(sampled)
        assert f"{self.run}/" in answer.headers["x-tandem-weight-version"]

    async def end(self) -> None:
        body = {"reason": {"type": "success"}}
        answer = await self._client.post(f"/api/v1/sessions/{self.session}/finish", json=body)
        assert answer.is_success, answer.text

    async def _post(self, route: str, **body: object) -> dict[str, str]:
        answer = await self._client.post(f"/api/v1/{route}", json=body)
        assert answer.is_success, answer.text
        return answer.json()

    async def _done(self, promise: dict[str, str]) -> httpx.Response:
        async with asyncio.timeout(PATIENCE):
            while True:
                body = {"request_id": promise["request_id"]}
                answer = await self._client.post("/api/v1/retrieve_future", json=body)
                if answer.status_code != 408:
                    assert answer.is_success, answer.text
                    return answer


def test_a_hundred_runs_share_a_few_trainers_and_leave_nothing(start):
    async def all_at_once(url: str) -> list[str]:
        async with httpx.AsyncClient(
            base_url=url, headers={"X-API-Key": KEY}, timeout=PATIENCE, verify=False
        ) as client:
            experiments = [Experiment(client) for _ in range(MANY)]
            await asyncio.gather(*(each.begin() for each in experiments))
            await asyncio.gather(*(each.step() for each in experiments))
            await asyncio.gather(*(each.sample() for each in experiments))
            for trainer in launcher.trainers:
                assert {run.history for run in trainer.runs.values()} == {undisturbed(1)}
            hosted = [run_id for trainer in launcher.trainers for run_id in trainer.runs]
            await asyncio.gather(*(each.end() for each in experiments))
            assert sorted(hosted) == sorted(each.run for each in experiments)
            return hosted

    launcher = FakeLauncher()
    with start(launcher=launcher) as gate:
        assert len(asyncio.run(all_at_once(gate.url))) == MANY
        assert len(launcher.trainers) == -(-MANY // MOST_RUNS)
        assert len(launcher.specs) == 2 * len(launcher.trainers), "and as many engines"
        wait_until(lambda: nothing_is_left(gate))


def test_each_run_has_its_own_steps_adapters_and_order(start):
    with start() as gate:
        first, second = Run.new(gate, rank=8), Run.new(gate, rank=4)
        assert first.trainer is second.trainer
        assert [run.training.rank for run in first.trainer.runs.values()] == [8, 4]
        second.backward(2)  # it waits for its predecessor
        train(first, 1, 2)
        second.backward(1)
        second.step(3)
        assert second.outcome(3).status_code == 200
        assert (first.state.step, second.state.step) == (2, 1)
        assert first.state.history == undisturbed(2)


def test_owners_share_no_trainer(start):
    with start() as gate:
        mine = Run.new(gate, rank=8)
        key = gate.run(gate.gateway.keys.create(NewKey(owner="ann", role="member")))[1]
        theirs = gate.trainer_of(gate.run_id(gate.session_id(key), rank=8))
        assert theirs is not mine.trainer


def test_a_run_that_asks_for_its_own_trainer_gets_it(start):
    with start() as gate:
        first = Run.new(gate, rank=8)
        alone = gate.trainer_of(gate.run_id(gate.session_id(), rank=8, share="never"))
        assert alone is not first.trainer
        assert Run.new(gate, rank=8).trainer is first.trainer


# --- Ends -----------------------------------------------------------------------------------------


def test_a_run_that_ends_leaves_its_trainer_to_the_others(start):
    with start() as gate:
        first, second = trained([Run.new(gate, rank=8) for _ in range(2)])
        finish(first.client, first.session_id)
        wait_until(lambda: [*second.trainer.runs] == [second.id])
        train(second, 3)
        third = Run.new(gate, rank=8)
        assert third.trainer is second.trainer
        assert gate.launcher.stopped == []
        for run in (second, third):
            finish(run.client, run.session_id)
        wait_until(lambda: nothing_is_left(gate))
        assert gate.launcher.stopped == [first.worker_id]


def test_a_session_ends_while_its_trainer_works_for_another(start):
    with start() as gate:
        first, second = (Run.new(gate, rank=8) for _ in range(2))
        second.hold()
        second.backward(1)
        wait_until(lambda: run_of(second).dispatcher.under_way)
        ending = threading.Thread(target=finish, args=(first.client, first.session_id))
        ending.start()
        wait_until(lambda: first.id not in second.trainer.runs)
        second.release()
        ending.join(PATIENCE)
        assert second.outcome(1).status_code == 200
        assert second.step(2).status_code == 200
        train(second, 2)
        assert second.state.history == undisturbed(2) and second.newest is second.trainer


def test_a_run_ends_while_its_trainer_sleeps(start):
    groups = [{"name": "gpu", "devices": ["cpu:0"], "roles": ["trainer", "sampler"]}]
    with start(groups=groups, sharing={"quantum": 0, "policy": "eager"}) as gate:
        first, second = trained([Run.new(gate, rank=8) for _ in range(2)])
        assert first.trainer is second.trainer
        wait_until(lambda: first.trainer.asleep)
        finish(first.client, first.session_id)
        wait_until(lambda: [*second.trainer.runs] == [second.id])
        train(second, 3)
        assert second.state.history == undisturbed(3) and second.newest is second.trainer


def test_a_run_for_which_the_trainer_has_no_memory_costs_the_others_nothing(start):
    class Full(FakeTrainer):
        async def AddRun(self, request, context):
            error = OutOfMemory("there is no memory for another run")
            return trainer_pb2.AddRunReply(failure=error.to_failure())

    with start(launcher=FakeLauncher(Full)) as gate:
        first = Run.new(gate, rank=8)
        train(first, 1)
        body = {"session_id": gate.session_id(), "model_seq_id": 0, "base_model": "tiny"}
        new = first.client.post("/api/v1/create_model", json=body | {"lora_config": {"rank": 8}})
        refused = gate.retrieve(new.json()["request_id"]).json()
        assert (refused["type"], "no memory for another run" in refused["error"]) == (
            "out_of_memory",
            True,
        )
        train(first, 2)
        assert first.newest is first.trainer and first.state.history == undisturbed(2)


# --- Deaths ---------------------------------------------------------------------------------------


def test_all_runs_of_a_trainer_that_dies_go_on_in_the_next(start):
    with start(recovery=SELDOM) as gate:
        runs = trained([Run.new(gate, rank=8) for _ in range(3)])
        runs[1].die()
        for steps, run in enumerate(runs, start=1):
            train(run, steps + 1)
            assert run.state.history == undisturbed(steps + 1)
        assert len({id(run.newest) for run in runs}) == 1
        assert len(gate.launcher.trainers) == 2
        status = runs[0].client.get("/api/tandem/v1/status").json()["runs"]
        assert [each["restored"] for each in status] == [1, 1, 1]


def test_each_run_is_restored_from_its_own_snapshot(start):
    with start(recovery=OFTEN) as gate:
        runs = [Run.new(gate, rank=8) for _ in range(3)]
        for steps, run in enumerate(runs, start=1):
            for number in range(1, steps + 1):
                train(run, number)
                wait_until(lambda r=run, n=number: run_of(r).log.newest.step == n)
        runs[0].die()
        for steps, run in enumerate(runs, start=1):
            train(run, steps + 1)
            assert run.state.history == undisturbed(steps + 1)
        loaded = {each.run_id: each for each in runs[0].newest.restored if each.path}
        assert set(loaded) == {run.id for run in runs}
        assert len(runs[0].newest.applied) == 2 * len(runs), "nothing is replayed"


def test_a_batch_without_memory_is_divided_and_the_others_are_restored(start):
    class Small(FakeTrainer):
        memory = MappingProxyType({3: 600})

    with start(recovery=SELDOM, launcher=FakeLauncher(Small)) as gate:
        other, large = (Run.new(gate, rank=8) for _ in range(2))
        train(other, 1)
        train(large, 1, 2)
        assert len(gate.launcher.trainers) == 3
        assert large.state.history == undisturbed(2)
        wait_until(lambda: other.id in large.newest.runs)
        other.step(3)
        assert other.outcome(3).status_code == 200
        assert other.state.step == 2


def test_a_run_that_always_kills_its_trainer_ends_alone(start, no_wait):
    class Fragile(FakeTrainer):
        async def ForwardBackward(self, request, context):
            if request.header.run_id == poisonous and request.header.seq_id == 2:
                await die(self, "it was killed by SIGKILL")
            return await super().ForwardBackward(request, context)

    poisonous = ""
    with start(recovery=SELDOM, launcher=FakeLauncher(Fragile)) as gate:
        other, bad = (Run.new(gate, rank=8) for _ in range(2))
        train(other, 1, 2)
        poisonous = bad.id
        bad.backward(1)
        refused = bad.outcome(1).json()
        assert refused["type"] == "worker_died"
        assert "died 3 times at operation 1" in refused["error"]
        train(other, 3)
        assert other.state.history == undisturbed(3)
        assert Run.new(gate, rank=8).newest is other.newest


# --- Samples --------------------------------------------------------------------------------------


def test_sessions_that_share_a_trainer_sample_from_their_own_weights_in_one_engine(start):
    with start() as gate, gate.service() as ann, gate.service() as bea:
        runs = [each.create_lora_training_client("tiny", rank=8).result() for each in (ann, bea)]
        assert gate.trainer_of(runs[0].model_id) is gate.trainer_of(runs[1].model_id)
        clients = [run.save_weights_and_get_sampling_client().result() for run in runs]
        for client in clients:
            prompt = types.ModelInput.from_ints([1, 2, 3])
            client.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result()
        _, engine = gate.worker("sampler")
        assert [spec.kind for spec in gate.launcher.specs] == ["trainer", "sampler"]
        assert [each.version.run_id for each in engine.requests] == [r.model_id for r in runs]
