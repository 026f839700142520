"""`tandem.rl.train` with a real trainer and engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tinker import ServiceClient

from tandem.rl import Evaluation, Example, LoopResult, RLConfig, resumable, train
from tandem.rl.environments import Step
from tandem.rl.rollouts import Prompt
from tests.support.loops import steps_in
from tests.support.rl_script import PROBLEMS, share_of_digits
from tests.support.stacks import TIED, TestStack
from tests.support.waiting import wait_until

CONFIG = RLConfig(
    steps=4,
    groups_per_step=4,
    group_size=4,
    max_tokens=8,
    learning_rate=1e-3,
    stop=(),
    grad_clip_norm=1.0,
)


def losses(result: LoopResult) -> list[float]:
    return [report.metrics["loss:sum"] for report in result.steps]


@pytest.mark.nightly
def test_a_synchronous_loop_that_was_continued_equals_the_uninterrupted_one(
    service: ServiceClient, tmp_path: Path
) -> None:
    training = resumable(service, f"{TIED}:full")
    whole = train(training, PROBLEMS, share_of_digits, CONFIG, tracked=False)
    first = train(
        training, PROBLEMS, share_of_digits, replace(CONFIG, steps=2, out=tmp_path), tracked=False
    )
    second = train(
        training, PROBLEMS, share_of_digits, replace(CONFIG, out=tmp_path), tracked=False
    )
    assert losses(first) + losses(second) == losses(whole)
    rewards = [report.reward for report in (*first.steps, *second.steps)]
    assert rewards == [report.reward for report in whole.steps]
    assert len(set(losses(whole))) == 4
    assert [report.oldest for report in whole.steps] == [0] * 4


def test_an_asynchronous_loop_in_flight_knows_its_tokens_versions_and_is_recorded(
    service: ServiceClient, stack: TestStack
) -> None:
    config = replace(
        CONFIG, steps=6, off_by=1, in_flight=True, evaluate_every=3, name="in flight", tags=("rl",)
    )
    evaluation = Evaluation(dataset=PROBLEMS[:4])
    training = resumable(service, f"{TIED}:full")
    result = train(training, PROBLEMS, share_of_digits, config, evaluation=evaluation)
    assert [report.step for report in result.steps] == [1, 2, 3, 4, 5, 6]
    assert max(report.oldest for report in result.steps) == 1
    assert [score.step for score in result.evaluations] == [0, 3, 6]
    load = asyncio.run(result.policy.load())
    assert load is not None
    assert load.waiting == 0
    assert 0 <= load.kv_used < 1
    with stack.stack.client() as client:
        [run] = client.get("runs", params={"name": "in flight"}).raise_for_status().json()["runs"]
        assert run["progress"]["percent"] == 100
        assert run["last"]["reward"] == result.steps[-1].reward
        assert run["last"]["evaluation/reward"] == result.evaluations[-1].reward
        rollouts = client.get(f"runs/{run['id']}/rollouts").raise_for_status().json()
        assert rollouts["total_count"] == 16


class Countdown:
    """Three answers, with token ids between them. The reward counts digits."""

    async def reset(self, example: Example) -> Prompt:
        self.left = 3
        return example.prompt

    async def step(self, answer: str) -> Step:
        self.left -= 1
        reward = sum(letter.isdigit() for letter in answer) / 8
        return Step(reward, [8, 9] if self.left else None)


def test_episodes_of_several_turns_train_the_sampled_tokens(
    service: ServiceClient, stack: TestStack
) -> None:
    """A token out of place would move the trainer's logprobs away from the sampler's."""
    config = replace(CONFIG, steps=2, name="episodes", max_tokens=6)
    training = resumable(service, f"{TIED}:full")
    result = train(training, PROBLEMS, Countdown, config)
    assert [dict(report.dropped) for report in result.steps] == [{}, {}]
    with stack.stack.client() as client:
        [run] = client.get("runs", params={"name": "episodes"}).raise_for_status().json()["runs"]
        [rollout, *_] = client.get(f"runs/{run['id']}/rollouts").json()["rollouts"]
    assert (rollout["turns"], rollout["ended"], len(rollout["tokens"])) == (3, "done", 18)
    assert run["last"]["tandem/answer_tokens"] == 18
    assert run["last"]["tandem/gap_max"] < 1e-4


@pytest.mark.nightly
def test_the_trainer_drops_no_sample_of_a_loop_that_continues_other_training(
    service: ServiceClient,
) -> None:
    options = {"max_staleness": 1}
    config = replace(CONFIG, steps=2, objective_options=options)
    first = train(resumable(service, f"{TIED}:full"), PROBLEMS, share_of_digits, config)
    continued = service.create_training_client_from_state(asyncio.run(first.policy.save("first")))
    again = train(continued.result(), PROBLEMS, share_of_digits, config)
    reports = [*first.steps, *again.steps]
    assert [report.metrics["dropped_stale:sum"] for report in reports] == [0] * 4


Start = Callable[[Path], subprocess.Popen[bytes]]
"""Starts the script with a folder for its files."""


@pytest.fixture(scope="module")
def start_script(stack: TestStack) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: Path) -> subprocess.Popen[bytes]:
        endpoint = stack.stack.endpoint
        given = [endpoint.url, endpoint.api_key, TIED, str(folder / "out"), str(folder / "losses")]
        with (folder / "log").open("ab") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.support.rl_script", *given],
                    stdout=log,
                    stderr=log,
                )
            )
        return started[-1]

    yield start
    for script in started:
        script.kill()
        script.wait()


def written(folder: Path) -> list[tuple[int, float]]:
    file = folder / "losses"
    lines = file.read_text().splitlines() if file.exists() else []
    return [tuple(json.loads(line)) for line in lines]


def await_losses(folder: Path, script: subprocess.Popen[bytes], *, count: int) -> None:
    def there() -> bool:
        assert script.poll() is None, (folder / "log").read_text()
        return len(written(folder)) >= count

    wait_until(there, timeout=480, what=f"{count} steps have a loss")


def await_end(folder: Path, script: subprocess.Popen[bytes]) -> None:
    assert script.wait(timeout=600) == 0, (folder / "log").read_text()


@pytest.fixture(scope="module")
def uninterrupted(
    start_script: Start, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, float]:
    """The losses by step."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    await_end(folder, start_script(folder))
    return dict(written(folder))


@pytest.mark.slow
def test_a_killed_script_continues_with_the_losses_of_an_uninterrupted_one(
    start_script: Start, uninterrupted: dict[int, float], tmp_path: Path
) -> None:
    script = start_script(tmp_path)
    await_losses(tmp_path, script, count=5)
    script.send_signal(signal.SIGKILL)
    script.wait()
    lost = len(written(tmp_path)) - steps_in(tmp_path / "out")
    await_end(tmp_path, start_script(tmp_path))
    found = written(tmp_path)
    assert dict(found) == uninterrupted
    assert all(loss == uninterrupted[step] for step, loss in found), "repeated steps, too"
    assert len(found) == 8 + lost


def kill_workers(kind: str, stack: TestStack, folder: Path) -> None:
    """Kill the trainer or the engine of a script."""
    session_id = (folder / "run").read_text().partition(":")[0]
    for process in stack.processes_of(stack.worker(kind, session_id=session_id)):
        os.kill(process.pid, signal.SIGKILL)


def kill_gateway(stack: TestStack, _folder: Path) -> None:
    stack.stack.process.kill()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(partial(kill_workers, "trainer"), id="trainer"),
        pytest.param(partial(kill_workers, "sampler"), id="engine"),
        pytest.param(kill_gateway, id="gateway"),
    ],
)
def test_a_loop_whose_server_is_killed_computes_the_losses_of_an_undisturbed_one(
    kill: Callable[[TestStack, Path], None],
    stack: TestStack,
    start_script: Start,
    uninterrupted: dict[int, float],
    tmp_path: Path,
) -> None:
    script = start_script(tmp_path)
    await_losses(tmp_path, script, count=3)
    kill(stack, tmp_path)
    await_end(tmp_path, script)
    assert written(tmp_path) == sorted(uninterrupted.items())
