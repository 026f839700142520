"""Weights from the trainer's memory to the engine."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from tinker import SamplingClient, TrainingClient, types

from tests.support.files import memory_files
from tests.support.sdk import SOON, train
from tests.support.stacks import TIED, TestStack, running, session_of, write_qwen
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


def saved(run: TrainingClient) -> SamplingClient:
    return run.save_weights_and_get_sampling_client().result(timeout=4 * SOON)


def drawn(sampler: SamplingClient) -> list[tuple[list[int], list[float] | None]]:
    params = types.SamplingParams(max_tokens=12, seed=11, stop=[])
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    answer = sampler.sample(prompt, 4, params).result(timeout=4 * SOON)
    return [(each.tokens, each.logprobs) for each in answer.sequences]


def loads(stack: TestStack) -> list[tuple[bool, str]]:
    """For each load, whether weights were handed over, or why not."""
    lines = (stack.data_dir / "logs" / "gateway.log").read_text().splitlines()
    entries = [json.loads(line) for line in lines if '"version_loaded"' in line]
    return [(entry["handed_off"], entry["handoff_failure"]) for entry in entries]


def has_files(process: int) -> bool:
    """A process has open files until it is nearly gone."""
    try:
        return any(Path(f"/proc/{process}/fd").iterdir())
    except FileNotFoundError:
        return False


@pytest.mark.timeout(600)
def test_an_engine_takes_the_weights_of_a_trainer_that_lives_and_the_files_of_one_that_does_not(
    tmp_path: Path,
):
    model = write_qwen(tmp_path / "model", seed=3)
    with (
        running(tmp_path, models={TIED: model}, settings={"weights_handoff": "on"}) as stack,
        stack.service() as service,
    ):
        run = service.create_lora_training_client(f"{TIED}:full").result(timeout=240)
        first = saved(run)
        assert loads(stack)[-1] == (False, ""), "there was no engine yet to hand it to"
        train(run, seed=1, steps=1)
        sampler = saved(run)
        assert loads(stack)[-1] == (True, "")
        trainer, engine = (
            stack.worker(kind, session_id=session_of(run))["pid"] for kind in ("trainer", "sampler")
        )
        # The trainer writes the files from the copy after the client has its result.
        wait_until(lambda: memory_files(trainer) == 0, what="the trainer has freed its copy")
        handed_over = drawn(sampler)
        assert drawn(first) != handed_over
        assert drawn(sampler) == handed_over, "from the files, which were loaded for it"

        train(run, seed=2, steps=1)
        version = stack.run(run)["weight_version"]
        os.kill(engine, signal.SIGSTOP)
        saving = run.save_weights_and_get_sampling_client()
        wait_until(
            lambda: stack.run(run)["weight_version"] != version, what="the version is written"
        )
        os.killpg(trainer, signal.SIGKILL)
        # A dying process loses its environment before its files, and the engine needs its files.
        wait_until(lambda: not has_files(trainer), what="the trainer has ended")
        os.kill(engine, signal.SIGCONT)
        sampler = saving.result(timeout=4 * SOON)
        handed_off, reason = loads(stack)[-1]
        assert not handed_off and "not in the trainer's memory" in reason
        assert drawn(sampler) != handed_over
        train(run, seed=3, steps=1)
        saved(run)
        assert loads(stack)[-1] == (True, ""), "by the trainer that replaced it"
