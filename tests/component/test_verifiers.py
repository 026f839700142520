"""Programs of the package verifiers are episodes of the loop, with exact tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.rl.environments.verifiers import VerifiersEnvironment
from tandem.rl.rollouts import Example

ROOT = Path(__file__).parents[2]
PATHS = (Path(sys.prefix) / "environments", ROOT / "tests/support", ROOT)


@pytest.fixture(scope="module")
def episodes():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.adder_episode"],
        env={"PYTHONPATH": ":".join(map(str, PATHS)), "PATH": "/usr/bin:/bin", "HOME": "/tmp"},
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["plain", "streamed"])
def test_a_programs_requests_continue_the_sampled_tokens(episodes, case):
    found = episodes[case]
    assert (found["examples"], found["reward"]) == (3, 1.0)
    assert found["fields"] == {"asked": 2.0, "turns": 2, "ended": "done"}
    _tools, _start, dialogue = found["text"].partition("<|im_start|>user\n")
    assert dialogue == (
        "2 + 1<|im_end|>\n<|im_start|>assistant\n"
        'I add. <tool_call>{"name": "add", "arguments": {"left": 2, "right": 1}}</tool_call>'
        "<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n3<|im_end|>"
    )
    assert '"name": "add"' in found["text"]


@pytest.mark.nightly
def test_a_wrong_answer_has_no_reward_and_a_failed_program_no_rollout(episodes):
    assert episodes["wrong"]["reward"] == 0.0
    assert "changed its history" in episodes["rewrites"]["error"]
    assert "the episode failed" in episodes["crashes"]["error"]
    assert "the program is broken" in episodes["crashes"]["error"]


@pytest.mark.nightly
def test_an_episode_that_the_loop_cuts_ends_its_program(episodes):
    assert episodes["cut"]["fields"]["ended"] == "max_turns"


async def test_without_the_package_the_error_says_what_to_install():
    environment = VerifiersEnvironment(object)
    try:
        with pytest.raises(ImportError, match="pip install verifiers"):
            await environment.reset(Example("", {"task": None}))
    finally:
        await environment.close()
