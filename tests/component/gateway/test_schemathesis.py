"""schemathesis checks the real gateway against its description."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.api.routing import RULES
from tests.support.gateway.access_world import OPERATIONS
from tests.support.gateway.running import KEY, running_gateway

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
HOOKS = ROOT / "tests/support/gateway/schemathesis_hooks.py"
ACCEPTED = ("2xx", "401", "403", "404", "410", "429")
"""For bodies that fit the schema. Most name things that do not exist."""


def config() -> str:
    """Only operations with rules beyond their schema may also answer 400."""
    lines = [f"hooks = {json.dumps(str(HOOKS))}"]
    lines += ["[checks.positive_data_acceptance]", f"expected-statuses = {json.dumps(ACCEPTED)}"]
    for name, operation in OPERATIONS.items():
        if RULES in (operation.openapi_extra or {}):
            lines += [
                "[[operations]]",
                f'include-operation-id = "{name}"',
                "[operations.checks.positive_data_acceptance]",
                f"expected-statuses = {json.dumps([*ACCEPTED, '400'])}",
            ]
    return "\n".join(lines) + "\n"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("examples", [6, pytest.param(15, marks=pytest.mark.nightly)])
def test_every_route_does_what_its_description_says(tmp_path, examples):
    with running_gateway(tmp_path, session_ttl=600, max_payload_bytes=2**20) as gate:
        config_file = tmp_path / "schemathesis.toml"
        config_file.write_text(config())
        command = [
            str(Path(sys.executable).with_name("schemathesis")),
            "--config-file",
            str(config_file),
            "run",
            f"{gate.url}/openapi.json",
            "--header",
            f"X-API-Key: {KEY}",
            "--checks=all",
            f"--max-examples={examples}",
            "--max-response-time=60",
            "--seed=1",
            "--continue-on-failure",
            "--no-color",
            "--workers=1",
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=1180, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-2000:]
