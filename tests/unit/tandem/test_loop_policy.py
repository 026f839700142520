from __future__ import annotations

import asyncio
import warnings
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
from tinker import types

from tandem.rl import Example, objective
from tandem.rl.policy import SyncTimedOut, TinkerPolicy
from tandem.rl.rollouts import Group, Rollout, Turn
from tandem.rl.server import EngineLoad, TandemServer
from tests.support.virtual_time import in_virtual_time, now

ADAM = types.AdamParams()


class _Training:
    """Notes the order of requests. A publication takes ten seconds."""

    model_id = "s-1:train:0"

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def _later(self, value):
        await asyncio.sleep(10)
        return value

    def save_weights_and_get_sampling_client(self, *, kind):
        self.asked.append(kind)
        return self._later(f"client {len(self.asked)}")


class _Routes(TandemServer):
    def __init__(self, answers: dict[str, object]) -> None:
        self._answers = answers
        self._run_id = "run"

    def _get(self, path, **query):
        return self._answers.get(path)


def knows(policy: TinkerPolicy, routes: TandemServer | None) -> TinkerPolicy:
    found = asyncio.get_running_loop().create_future()
    found.set_result(routes)
    policy._server = found
    return policy


@in_virtual_time
async def test_a_sync_asks_before_it_waits_and_shares_its_weights_with_an_evaluation():
    training = _Training()
    policy = TinkerPolicy(training, step=4)
    snapshot = policy.snapshot()
    syncing = asyncio.create_task(policy.sync(timeout=60))
    await asyncio.sleep(0)
    assert training.asked == ["snapshot"]
    await syncing
    assert (await snapshot).step == 4
    assert now() == pytest.approx(10)


@in_virtual_time
async def test_an_evaluation_beside_samples_in_flight_has_weights_of_its_own():
    training = _Training()
    policy = TinkerPolicy(training, in_flight=True)
    snapshot = policy.snapshot()
    await policy.sync(timeout=60)
    await snapshot
    assert training.asked == ["snapshot", "inflight"]


@in_virtual_time
async def test_a_late_sync_says_which_weights_were_late():
    policy = TinkerPolicy(_Training(), step=7)
    with pytest.raises(SyncTimedOut, match="weights of step 7 within 5 s"):
        await policy.sync(timeout=5)
    assert now() == pytest.approx(5)


CONTINUED = {"parent_step": 300, "last_step": None}
"""A run that loaded a checkpoint of step 300."""


class _LateRoutes(_Routes):
    """A gateway that is silent twice, because another one replaces it."""

    silent = 2

    def _get(self, path, **query):
        self.silent -= 1
        return None if self.silent >= 0 else super()._get(path, **query)


class _StepTraining(_Training):
    """Trains at once, and keeps the newest batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def forward_backward(self, data, loss, settings):
        self.sent = data
        self.lengths.append(data[0].model_input.length)
        return self._done()

    def optim_step(self, parameters):
        return self._done()

    async def _done(self):
        return SimpleNamespace(metrics={})


@pytest.mark.parametrize(
    ("step", "state", "earlier"),
    [
        (0, {"parent_step": None, "last_step": None}, 0),
        (0, CONTINUED, 300),
        (4, {"parent_step": 304, "last_step": None}, 300),
        (4, CONTINUED | {"last_step": {"step": 304}}, 300),
    ],
)
@in_virtual_time
async def test_the_trainer_gets_the_steps_of_weights_as_it_counts_them(step, state, earlier):
    training = _StepTraining()
    policy = knows(TinkerPolicy(training, step=step), _LateRoutes({"runs/run": state}))
    made = replace(objective("distillation", max_staleness=1), reference_weight=0.0)
    data = await made.data([group_of(turn("r1:0"), turn("r2:0"))])
    for _ in range(2):
        await policy.train(data, "importance_sampling", {"max_staleness": 1.0}, ADAM)
        [sent] = training.sent
        old = 2 + earlier
        assert sent.loss_fn_inputs["weight_step"].data == [old] * 3 + [-1] + [old] * 3
    assert policy.step == step + 2


@in_virtual_time
async def test_two_optimizer_steps_are_sent_in_their_order_after_questions_of_the_first():
    training = _StepTraining()
    policy = knows(TinkerPolicy(training), _LateRoutes({"runs/run": CONTINUED}))
    made = [
        replace(objective("distillation", **settings), reference_weight=0.0)
        for settings in ({"max_staleness": 1}, {})
    ]
    batches = [
        await each.data([group_of(turn("r1:0", tokens))])
        for each, tokens in zip(made, (3, 2), strict=True)
    ]
    steps = [
        asyncio.create_task(policy.train(each, "importance_sampling", {}, ADAM)) for each in batches
    ]
    await asyncio.gather(*steps)
    assert training.lengths == [3, 2]


def group_of(*turns: Turn) -> Group:
    return Group(number=0, example=Example([1]), rollouts=[Rollout(turns=turns, reward=1.0)])


def turn(sequence_id: str, tokens: int = 3) -> Turn:
    return Turn(
        observation=[1],
        tokens=[2] * tokens,
        logprobs=[-1.0] * tokens,
        steps=[2] * tokens,
        sequence_id=sequence_id,
    )


@in_virtual_time
async def test_tokens_sampled_in_flight_get_the_steps_of_their_versions():
    runs = [{"version": "a", "step": 302, "tokens": 2}, {"version": "b", "step": 304, "tokens": 1}]
    routes = _Routes(
        {
            "samples/versions": {
                "requests": [
                    {"request_id": "r1", "samples": [runs[:1], runs]},
                    {"request_id": "r2", "samples": []},
                    {"request_id": "r3", "error": "it was forgotten", "type": "unknown_request"},
                ]
            },
            "runs/run": CONTINUED | {"last_step": {"step": 304}},
        }
    )
    policy = knows(TinkerPolicy(_Training(), step=4, in_flight=True), routes)
    [found] = await policy.resolve([group_of(turn("r1:1"), turn("r2:0"), turn("r3:0"), turn(""))])
    assert [list(each.steps) for each in found.rollouts[0].turns] == [
        [2, 2, 4],
        [2, 2, 2],
        [2, 2, 2],
        [2, 2, 2],
    ]
    assert found.oldest_step == 2


@in_virtual_time
async def test_the_load_is_known_while_an_engine_is_awake():
    engines = [{"running": 3}, {"running": None}]
    state = {"waiting": 2, "kv_used": 0.4, "engines": engines}
    policy = knows(TinkerPolicy(_Training()), _Routes({"samplers/run": state}))
    load = await policy.load()
    assert load == EngineLoad(waiting=2, kv_used=0.4)
    asleep = {**state, "engines": [{"running": None}]}
    assert await knows(policy, _Routes({"samplers/run": asleep})).load() is None
    assert await knows(policy, _Routes({})).load() is None
    assert await knows(policy, None).load() is None


SILENT = "http://gateway does not answer: status 503"


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        (["refused", 503, 200], True),
        ([200], True),
        ([404], False),
        ([401], False),
        (["refused", 404], False),
        ([503] * 99, False),
    ],
)
@in_virtual_time
async def test_a_gateway_that_is_silent_for_a_while_is_found(monkeypatch, answers, found):
    left = iter(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        if (status := next(left)) == "refused":
            raise httpx.ConnectError("refused")
        known = request.url.path == "/api/tandem/v1/runs/s-1:train:0"
        return httpx.Response(status, json={"last_step": None} if known else None)

    monkeypatch.setattr(
        "tandem.rl.server.http_client",
        lambda url, **_options: httpx.Client(base_url=url, transport=httpx.MockTransport(answer)),
    )
    training = _Training()
    training.holder = SimpleNamespace(_base_url="http://gateway", _api_key="key")
    policy = TinkerPolicy(training)
    with warnings.catch_warnings(record=True) as warned:
        assert (await policy._find_server() is not None) == found
    said = [str(each.message) for each in warned]
    assert said == ["the loop uses no route of Tandem: " + SILENT] * (len(answers) == 99)
    assert now() < 61


def test_a_page_of_a_proxy_counts_as_a_silent_gateway():
    page = httpx.MockTransport(lambda _request: httpx.Response(200, text="<html>"))
    with httpx.Client(transport=page, base_url="http://gateway") as client:
        assert TandemServer(client, run_id="run").load() is None
