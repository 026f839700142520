from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from tandem.rl.rewards import RewardFailed, RewardPool
from tandem.rl.rollouts import Example
from tests.support.waiting import until, wait_until


def by_command(example: Example, answer: str) -> float:
    """Does what an answer says."""
    match answer:
        case "sleep":
            time.sleep(60)
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(3)
        case "raise":
            raise OSError("no such file")
        case "nan":
            return math.nan
        case "text":
            return "1.0"  # type: ignore[return-value]
        case "child":
            child = subprocess.Popen(["sleep", "60"])
            Path(str(example.data["path"])).write_text(str(child.pid))
            time.sleep(60)
    return float(answer == example.data.get("answer"))


async def by_command_in_the_loop(example: Example, answer: str) -> float:
    if answer == "sleep":
        await asyncio.sleep(60)
    return by_command(example, answer)


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, example: Example, answer: str) -> float:
        return self.scale * by_command(example, answer)


def runs(process: int | None) -> bool:
    try:
        return process is not None and psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


FIVE = Example("2+3=", {"answer": "5"})


async def longest_pause(until: asyncio.Event) -> float:
    """Seconds that the event loop was late at most."""
    longest = 0.0
    while not until.is_set():
        before = time.monotonic()
        await asyncio.sleep(0.005)
        longest = max(longest, time.monotonic() - before - 0.005)
    return longest


@pytest.mark.parametrize(
    "reward", [by_command, by_command_in_the_loop, Scaled(1.0), partial(by_command)]
)
async def test_a_reward_scores_answers(reward):
    async with RewardPool(reward, processes=1) as pool:
        assert [await pool.score(FIVE, answer) for answer in ("5", "6")] == [1.0, 0.0]
    assert not pool.failures


@pytest.mark.parametrize("reward", [by_command, by_command_in_the_loop])
async def test_each_failure_drops_one_answer_and_is_counted_by_reason(reward):
    async with RewardPool(reward, processes=2, timeout=5.0) as pool:
        answers = ["5", "raise", "nan", "text", "5", "sys.exit" if reward is by_command else "nan"]
        scores = await asyncio.gather(*(pool.score(FIVE, answer) for answer in answers))
    assert scores == [1.0, None, None, None, 1.0, None]
    assert pool.failures == {"exception": 4}


async def test_a_crash_costs_only_the_answer_under_way():
    async with RewardPool(by_command, processes=2) as pool:
        answers = ["5", "exit"] * 3 + ["5"] * 10
        scores = await asyncio.gather(*(pool.score(FIVE, answer) for answer in answers))
    assert scores == [1.0, None] * 3 + [1.0] * 10
    assert pool.failures == {"crash": 3}


async def test_a_late_reward_is_killed_and_the_event_loop_goes_on():
    async with RewardPool(by_command, processes=1, timeout=1.0) as pool:
        assert await pool.score(FIVE, "5") == 1.0
        ended = asyncio.Event()
        watch = asyncio.create_task(longest_pause(ended))
        started = time.monotonic()
        assert await pool.score(FIVE, "sleep") is None
        assert await pool.score(FIVE, "5") == 1.0
        assert time.monotonic() - started < 30
        ended.set()
        print(f"event-loop lag: {await watch:.4f} s")
    assert pool.failures == {"timeout": 1}
    assert pool.last_failure == "The reward took longer than 1 s (reward_timeout)"


async def test_a_late_async_reward_is_cancelled():
    async with RewardPool(by_command_in_the_loop, timeout=0.05) as pool:
        assert await pool.score(FIVE, "sleep") is None
    assert pool.failures == {"timeout": 1}


async def test_a_failure_ends_the_loop_or_counts_as_zero_if_the_user_asks_for_it():
    async with RewardPool(by_command, processes=1, failure="zero") as pool:
        assert await pool.score(FIVE, "raise") == 0.0
        assert pool.failures == {"exception": 1}
    async with RewardPool(by_command, processes=1, failure="error") as pool:
        with pytest.raises(RewardFailed, match="OSError: no such file"):
            await pool.score(FIVE, "raise")


async def test_a_cancelled_score_frees_its_process():
    async with RewardPool(by_command, processes=1) as pool:
        await pool.score(FIVE, "5")
        score = asyncio.create_task(pool.score(FIVE, "sleep"))
        await asyncio.sleep(0.1)
        score.cancel()
        assert await pool.score(FIVE, "5") == 1.0
    assert not pool.failures


async def test_a_process_that_died_between_two_answers_costs_none():
    async with RewardPool(by_command, processes=1) as pool:
        assert await pool.score(FIVE, "5") == 1.0
        [worker] = pool._workers
        os.kill(worker._process or 0, signal.SIGKILL)
        await until(lambda: not worker.alive, what="it has ended")
        assert await pool.score(FIVE, "5") == 1.0
    assert not pool.failures


class SlowToLoad:
    def __setstate__(self, state: object) -> None:
        time.sleep(3600)

    def __getstate__(self) -> object:
        return {"slow": True}

    def __call__(self, example: Example, answer: str) -> float:
        return 1.0


async def test_processes_end_with_a_pool_that_ends_while_they_start():
    before = set(psutil.Process().children())
    for pauses in range(5):
        async with RewardPool(SlowToLoad(), processes=2):
            for _ in range(pauses):
                await asyncio.sleep(0)

    await until(lambda: not others(before), what="all have ended")


async def test_processes_end_with_the_pool_and_with_late_rewards(tmp_path):
    example = Example("", {"path": str(tmp_path / "pid")})
    async with RewardPool(by_command, processes=2, timeout=1.0) as pool:
        assert await pool.score(example, "child") is None
        grandchild = int((tmp_path / "pid").read_text())
        processes = [worker._process for worker in pool._workers]
    await until(lambda: not any(map(runs, (*processes, grandchild))), what="all have ended")


async def test_scores_under_way_at_the_end_of_a_pool_start_no_process():
    before = set(psutil.Process().children())
    async with RewardPool(by_command, processes=1) as pool:
        assert await pool.score(FIVE, "5") == 1.0
        late = asyncio.create_task(pool.score(FIVE, "sleep"))
        waiting = asyncio.create_task(pool.score(FIVE, "5"))
        await asyncio.sleep(0)  # the first has the process
    assert await late is None
    with pytest.raises(RuntimeError, match="is closed"):
        await waiting
    await until(lambda: not others(before), what="all have ended")
    assert not pool._starts


def others(before: set[psutil.Process]) -> set[psutil.Process]:
    """New child processes that still run."""
    return {
        child
        for child in set(psutil.Process().children()) - before
        if runs(child.pid) and "resource_tracker" not in " ".join(child.cmdline())
    }


def test_a_reward_that_no_process_can_import_is_refused():
    with pytest.raises(ValueError, match="Define it at the top of a module or script"):
        RewardPool(lambda example, answer: 1.0)


SCRIPT = """
import asyncio, os, sys
from tandem.rl.rewards import RewardPool
from tandem.rl.rollouts import Example

def reward(example, answer):
    return len(answer)

async def main():
    async with RewardPool(reward, processes=1) as pool:
        print(await pool.score(Example(""), "abc"), flush=True)
        if "killed" in sys.argv:
            print(pool._workers[0]._process, flush=True)
            os.kill(os.getpid(), 9)
"""


def run_script(
    folder: Path, end: str, *arguments: str, by: tuple[str, ...] = ("script.py",)
) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT + end)
    command = [sys.executable, *by, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("by", [("script.py",), ("-m", "script")], ids=["file", "module"])
def test_a_script_may_define_its_reward(tmp_path, by):
    done = run_script(tmp_path, '\nif __name__ == "__main__":\n    asyncio.run(main())\n', by=by)
    assert done.stdout == "3.0\n", done.stderr


@pytest.mark.parametrize("by", [("script.py",), ("-m", "script")], ids=["file", "module"])
def test_a_script_without_a_main_part_is_refused_before_it_starts_itself_again(tmp_path, by):
    done = run_script(tmp_path, "\nasyncio.run(main())\n", by=by)
    assert 'under `if __name__ == "__main__":`' in done.stderr


def test_the_processes_of_a_killed_script_end(tmp_path):
    end = '\nif __name__ == "__main__":\n    asyncio.run(main())\n'
    done = run_script(tmp_path, end, "killed")
    assert done.returncode == -9
    process = int(done.stdout.splitlines()[1])
    wait_until(lambda: not runs(process), what="the reward's process has ended")
