"""The page's session with curl, against a real stack."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

from tests.support.stacks import LLAMA, TestStack

PAGE = Path(__file__).parents[2] / "docs/training.md"


def test_the_documented_commands_train_one_step_and_sample(stack: TestStack) -> None:
    section = PAGE.read_text().partition("## Without the SDK")[2]
    found = re.search(r"```bash\n(.*?)```", section, re.S)
    assert found is not None
    endpoint = stack.stack.endpoint
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", found[1].replace("my/model", LLAMA)],
        env={**os.environ, "TINKER_BASE_URL": endpoint.url, "TINKER_API_KEY": endpoint.api_key},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answers = json.loads("[" + done.stdout.replace("}{", "},{") + "]")
    results = {one["type"]: one for one in answers if "type" in one}
    assert "error" not in done.stdout
    assert len(results["forward_backward"]["loss_fn_outputs"][0]["logprobs"]["data"]) == 3
    assert results["forward_backward"]["metrics"]["loss:sum"] > 0
    assert results["optim_step"]["metrics"]
    assert [len(each["tokens"]) <= 8 for each in results["sample"]["sequences"]] == [True, True]
