"""Ctrl-C in a script with a loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from tests.support.processes import marked
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = """
import signal

from tandem.rl import train
from tests.support.loops import FakePolicy, NumberTokenizer, a_config, numbered
from tests.support.rl_script import share_of_digits

class Policy(FakePolicy):
    async def train(self, *arguments):
        print("training", flush=True)
        return await super().train(*arguments)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job of a shell
    policy = Policy(sampling=0.1, training=0.1)
    config = a_config(steps=100000, off_by=2)
    train(policy, numbered(40), share_of_digits, config, tokenizer=NumberTokenizer())
"""


def test_ctrl_c_ends_a_loop_and_the_processes_of_its_rewards(tmp_path):
    mark = f"test-{uuid.uuid4().hex}"
    (tmp_path / "script.py").write_text(SCRIPT)
    script = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MARK_OF_THE_TEST": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert script.stdout is not None
    assert script.stdout.readline() == "training\n"
    script.send_signal(signal.SIGINT)
    _, errors = script.communicate(timeout=60)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert script.returncode == -signal.SIGINT
    assert "never" not in errors, "no task was destroyed, and no coroutine forgotten"
    wait_until(lambda: not marked(mark), what="the processes of the rewards have ended")
