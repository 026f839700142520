"""Secrets stay out of logs, errors, metrics and others' files."""

from __future__ import annotations

import io
import json
import logging
import os
import stat
from pathlib import Path

import httpx
import pytest

from tandem.agent.launcher import ProcessLauncher
from tandem.protocol.worker import WorkerSpec
from tandem.stack import read_endpoint
from tandem.stack.supervised_process import _private
from tandem.telemetry import configure_logging, get_log, without_credentials
from tests.support.gateway.access_world import World
from tests.support.gateway.running import forward_backward_bytes, running_gateway
from tests.support.gateway.runs import Run
from tests.support.telemetry import logging_restored
from tests.support.waiting import wait_until

NEW = "tml-" + "Zz9_-" * 8
TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJrZXkiOiJrLTEifQ.c2lnbmF0dXJlLW9mLWl0"


@pytest.fixture
def log(capfd):
    """This process's logs, configured like a gateway's."""
    stream = io.StringIO()
    with logging_restored():
        configure_logging(service="gateway", level="debug", stream=stream)
        yield stream


def test_a_key_in_any_place_of_a_request_is_in_no_log_no_answer_and_no_metric(tmp_path, log):
    with running_gateway(tmp_path) as gate:
        world = World(gate, tmp_path)
        good = world.keys["member"]
        for key in (NEW, TOKEN, good):
            with httpx.Client(base_url=gate.url, timeout=20) as client:
                answers = [
                    client.get("/api/v1/sessions", headers={"X-API-Key": key + "x"}),
                    client.get("/api/v1/sessions", headers={"Authorization": f"Bearer {key}x"}),
                    client.get("/api/v1/sessions", headers={"Authorization": f"Basic {key}"}),
                    client.get("/api/v1/sessions", params={"api_key": key}),
                    client.get(f"/api/v1/samplers/{key}"),
                    client.delete(f"/api/tandem/v1/keys/{key}"),
                    client.post("/api/v1/auth/token", json={"api_key": key}),
                    client.post(f"/{key}", content=key),
                    client.get("/api/v1/sessions", headers={"Cookie": f"key={key}"}),
                ]
            assert {answer.status_code for answer in answers} == {401}
            assert all(key not in answer.text for answer in answers)
            assert key not in httpx.get(f"{gate.url}/metrics", timeout=30).text
        with httpx.Client(base_url=gate.url, headers={"X-API-Key": good}, timeout=30) as client:
            client.get(f"/api/v1/samplers/{NEW}")
            client.post("/api/v1/create_session", json={"tags": NEW})
            config = client.get("/api/tandem/v1/config", headers={"X-API-Key": world.keys["admin"]})
        for secret in (gate.gateway.api_key, gate.gateway.signing_key.hex()):
            assert secret not in config.text
        secrets = [worker.secret for worker in gate.launcher.specs]
        assert secrets
    said = log.getvalue()
    assert "key_refused" in said
    for secret in (NEW, TOKEN, good, *secrets):
        assert secret not in said


def test_the_log_takes_out_what_looks_like_a_key_or_a_token(log):
    get_log().error("oops", path=f"/x/{NEW}/y", detail={"token": TOKEN})
    logging.getLogger("library").warning("called with %s", NEW)
    try:
        raise ValueError(f"bad {TOKEN}")
    except ValueError:
        get_log().exception("failed")
    said = log.getvalue()
    assert said.count("(credential)") == 4 or said.count("(credential)") > 4
    assert NEW not in said
    assert TOKEN not in said
    assert all(json.loads(line) for line in said.splitlines())


def test_names_that_only_resemble_keys_stay():
    for text in (
        "tml-test",
        "tml:organization_user:ann",
        "k-9f86d081884c",
        "eyJ",
        "s-ab12:train:0",
    ):
        assert without_credentials(text) == text


def test_files_with_secrets_are_for_their_owner_alone(tmp_path):
    old = os.umask(0o022)
    try:
        with running_gateway(tmp_path, api_key="") as gate:
            folder = gate.settings.data_dir
            assert mode(folder) == 0o700
            for name in ("api_key", "signing_key", "gateway.json", "gateway.lock"):
                assert mode(folder / name) == 0o600, name
        log = tmp_path / "a.log"
        with open(log, "ab", opener=_private):
            assert mode(log) == 0o600
    finally:
        os.umask(old)


def test_what_no_worker_is_to_read_may_lie_beyond_what_workers_share(tmp_path, monkeypatch):
    private = tmp_path / "private"
    monkeypatch.setenv("TANDEM_PRIVATE_DIR", str(private))
    with running_gateway(tmp_path, private_dir=private) as gate:
        run_id = gate.run_id(gate.session_id())
        worker_id, trainer = gate.worker("trainer")
        with gate.http() as client:
            run = Run(gate, run_id, worker_id, trainer, client)
            run.hold()
            run.backward(1, forward_backward_bytes(run.id, 1, forward_only=True, tokens=2**15))
            wait_until(lambda: any((private / "operations").rglob("1")))
            run.release()
            run.outcome(1)
        found = read_endpoint(gate.settings.data_dir)
        assert found is not None and found.url == gate.url
    with running_gateway(tmp_path, private_dir=private, api_key=""):
        mine = {path.name for path in private.iterdir()}
        assert {"api_key", "signing_key", "gateway.json", "operations"} <= mine
        assert not mine & {path.name for path in gate.settings.data_dir.iterdir()}
        assert mode(private) == 0o700


async def test_a_workers_log_is_for_its_owner_alone_and_its_spec_is_in_no_argument(tmp_path):
    spec = WorkerSpec(
        worker_id="w", kind="trainer", secret="s" * 32, model_name="m", model_path="/m",
        session_id="s",
    )  # fmt: skip
    seen = tmp_path / "seen"
    script = f"cat /proc/self/cmdline /proc/self/environ > {seen}; exit 3"
    launcher = ProcessLauncher(
        data_dir=tmp_path,
        command=lambda _: ["sh", "-c", script],
    )
    with pytest.raises(Exception, match="exited with status 3"):
        await launcher.start(spec)
    await launcher.close()
    assert mode(tmp_path / "logs" / "w.log") == 0o600
    assert spec.secret.encode() not in seen.read_bytes()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
