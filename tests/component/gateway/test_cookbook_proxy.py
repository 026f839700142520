"""Agents behind tinker-cookbook's proxy shorten prompts that are too long."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.support.gateway.running import KEY
from tests.support.gateway.speaking_models import speaking_gateway

ROOT = Path(__file__).resolve().parents[3]


def test_a_prompt_that_does_not_fit_is_a_bad_request_of_the_agent(tmp_path):
    def request(path: str, text: str, *, max_tokens: int) -> str:
        messages = [{"role": "user", "content": text}]
        body = {"model": "any", "max_tokens": max_tokens, "messages": messages}
        return json.dumps([path, body])

    lines = [
        request("/v1/chat/completions", "x" * 200, max_tokens=4),
        request("/v1/messages", "x" * 200, max_tokens=4),
        request("/v1/messages", "hi", max_tokens=32000),
        request("/v1/chat/completions", "hi", max_tokens=4),
    ]
    with speaking_gateway(tmp_path) as gate:
        model = str(tmp_path / "speaker")
        finished = subprocess.run(
            [str(ROOT / "scripts/cookbook.sh"), "tests.support.cookbook_proxy", model],
            input="\n".join(lines),
            env={**os.environ, "TINKER_BASE_URL": gate.url, "TINKER_API_KEY": KEY},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert finished.returncode == 0, finished.stderr[-4000:]
    *refused, served = [json.loads(line) for line in finished.stdout.splitlines()]
    for status, answer in refused:
        assert status == 400
        assert answer["error"]["message"].startswith("prompt is too long: ")
    assert served[0] == 200
