"""Tasks of reasoning-gym are examples and rewards of the loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.rl.environments import reasoning_gym

PACKAGES = Path(sys.prefix) / "environments"
ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, pickle
from tandem.rl.environments.reasoning_gym import examples, score

found = {}
for name, settings in (("leg_counting", {"max_animals": 3}), ("basic_arithmetic", {})):
    dataset = examples(name, size=4, seed=7, **settings)
    assert [each.prompt for each in dataset] == [
        each.prompt for each in examples(name, size=4, seed=7, **settings)
    ]
    [first, *_] = pickle.loads(pickle.dumps(dataset))
    right = first.data["entry"]["answer"]
    found[name] = [
        [message["role"] for message in first.prompt],
        score(first, f"<answer>1</answer> or <answer> {right} </answer>"),
        score(first, f"<answer>{right}x</answer>") < 1,
        score(first, right),
    ]
print(json.dumps(found))
"""


@pytest.mark.nightly
def test_its_tasks_are_examples_with_a_verifier():
    printed = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PYTHONPATH": f"{PACKAGES}:{ROOT}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    expected = [["system", "user"], 1.0, True, 0.0]
    assert json.loads(printed) == {"leg_counting": expected, "basic_arithmetic": expected}


def test_without_the_package_the_error_says_what_to_install():
    with pytest.raises(ImportError, match="pip install reasoning-gym"):
        reasoning_gym.examples("leg_counting", size=1)
