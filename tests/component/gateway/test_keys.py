"""Keys, by the API, the command and the SDK."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager

import pytest
import tinker
from sqlalchemy import select
from structlog.testing import capture_logs
from typer.testing import CliRunner

from gateway.core import Gateway
from gateway.metrics import Metrics
from gateway.owners.auth.identity import Caller
from gateway.owners.auth.keys import NewKey
from gateway.storage.tables import keys as table
from gateway.workers.epoch import Epoch
from gateway.workers.launchers.base import for_each_kind
from tandem.cli.main import app
from tandem.errors import InvalidRequest
from tandem.settings.playground import PlaygroundSettings
from tests.support.audit_log import audit_log
from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.gateway.running import KEY, make_model, running_gateway, settings_for
from tests.support.gateway.visitors import ASKED
from tests.support.postgres import url_for
from tests.support.waiting import wait_until

OWN = "/api/tandem/v1"


def new(role: str = "member", **about) -> NewKey:
    return NewKey(owner="ann", role=role, **about)


def test_an_admin_makes_lists_and_revokes_keys_and_each_is_shown_once(gate):
    with gate.http() as admin:
        made = admin.post(
            f"{OWN}/keys", json={"owner": "ann", "role": "reader", "expires_in": 3600}
        )
        assert made.headers["cache-control"] == "no-store"
        secret = made.json()["key"]
        with gate.http(secret) as client:
            assert client.get("/api/v1/sessions").status_code == 200
        listed = admin.get(f"{OWN}/keys")
        assert secret not in listed.text
        mine = next(k for k in listed.json()["keys"] if k["id"] == made.json()["id"])
        assert (mine["owner"], mine["role"], mine["state"]) == ("ann", "reader", "active")
        assert mine["last_used_at"] is not None
        assert listed.json()["keys"][0]["local"] is True
        assert admin.delete(f"{OWN}/keys/{mine['id']}").json()["state"] == "revoked"
        with gate.http(secret) as client:
            refused = client.get("/api/v1/sessions")
            assert refused.status_code == 401
            assert "was revoked" in refused.json()["error"]
        assert admin.delete(f"{OWN}/keys/{mine['id']}").status_code == 200, "asked again"
        audit = audit_log(admin, event_type="organizations")
        acts = [e["event"] for e in audit if mine["id"] in json.dumps(e)]
        assert acts == ["apikey_create", "apikey_delete", "apikey_delete"]
        assert secret not in json.dumps(audit)


def test_a_wrong_key_learns_nothing_and_a_revoked_one_only_that_it_was_revoked(gate):
    key, secret = gate.run(gate.gateway.keys.create(new()))
    gate.run(gate.gateway.keys.revoke(key.id))
    answers = {}
    for presented in (secret, "tml-" + "A" * 43, "", "x"):
        with gate.http(presented) as client:
            answers[presented] = client.get("/api/v1/sessions")
    bodies = {p: a.json() for p, a in answers.items()}
    assert {a.status_code for a in answers.values()} == {401}
    assert {b["type"] for b in bodies.values()} == {"unauthenticated"}
    assert len({b["error"] for p, b in bodies.items() if p != secret}) == 1
    headers = {
        tuple(sorted({**a.headers, "date": "", "content-length": ""}.items()))
        for a in answers.values()
    }
    assert len(headers) == 1


def test_refused_keys_are_all_counted_and_a_burst_is_logged_once_without_the_key(tmp_path):
    with (
        running_gateway(tmp_path, session_ttl=600) as gate,
        capture_logs() as lines,
        gate.http("tml-a-wrong-secret") as client,
    ):
        for _ in range(30):
            client.get("/api/v1/sessions")
        counter = gate.gateway.metrics.refused_keys.labels(reason="unauthenticated")
        wait_until(lambda: counter._value.get() == 30)
    assert [line["event"] for line in lines].count("key_refused") == 1
    assert "wrong-secret" not in str(lines)


def test_who_gives_up_its_own_key_is_refused_from_then_on(gate):
    key, secret = gate.run(gate.gateway.keys.create(new()))
    with gate.http(secret) as client:
        token = client.post("/api/v1/auth/token").json()["jwt"]
        about = client.get("/api/v1/auth/apikey/me").json()
        assert about["key_id"] == key.number
        assert about["details"]["user_details"]["email"] == "ann"
        assert client.delete("/api/v1/auth/apikey/me").status_code == 204
        assert client.get("/api/v1/auth/apikey/me").status_code == 401
    with gate.http(token) as client:
        refused = client.get("/api/v1/sessions")
        assert refused.status_code == 401
        assert refused.json()["type"] == "token_refused"


def test_a_bearer_token_is_a_key_too(gate):
    with gate.http("") as client:
        del client.headers["X-API-Key"]
        for scheme in ("Bearer", "bearer"):
            client.headers["Authorization"] = f"{scheme} {KEY}"
            assert client.get("/api/v1/sessions").status_code == 200
        client.headers["Authorization"] = f"Basic {KEY}"
        assert client.get("/api/v1/sessions").status_code == 401


def test_metrics_are_open_to_this_machine_and_not_to_what_a_proxy_passes_on(gate):
    with gate.http("") as client:
        assert client.get("/metrics").status_code == 200
        for header in ("X-Forwarded-For", "Forwarded"):
            assert client.get("/metrics", headers={header: "203.0.113.9"}).status_code == 401
    reader = gate.run(gate.gateway.keys.create(new("reader")))[1]
    with gate.http(reader) as client:
        answer = client.get("/metrics", headers={"X-Forwarded-For": "203.0.113.9"})
        assert answer.status_code == 200


def test_the_sdk_raises_its_typed_errors_at_once(gate):
    """It does not repeat refused requests."""
    for key, role, error, status in (
        ("tml-wrong", "", tinker.AuthenticationError, 401),
        ("", "reader", tinker.PermissionDeniedError, 403),
        ("", "member", tinker.NotFoundError, 404),
    ):
        secret = key or gate.run(gate.gateway.keys.create(new(role)))[1]
        before = answered(gate, status)
        with pytest.raises(error):
            if role == "member":
                tinker.RestClient(base_url=gate.url, api_key=secret).get_session(
                    "s-000000000000"
                ).result()
            else:
                tinker.ServiceClient(base_url=gate.url, api_key=secret).holder.get_session_id()
        # The gateway counts a request after it has sent the answer.
        wait_until(lambda status=status, before=before: answered(gate, status) > before)
        assert answered(gate, status) - before == 1


def test_a_client_whose_key_is_revoked_while_it_works_is_told_at_once(gate):
    key, secret = gate.run(gate.gateway.keys.create(new()))
    service = tinker.ServiceClient(base_url=gate.url, api_key=secret)
    sampler = service.create_sampling_client(base_model="tiny").result()
    gate.run(gate.gateway.keys.revoke(key.id))
    before = answered(gate, 401)
    prompt = tinker.ModelInput.from_ints([1, 2])
    with pytest.raises(tinker.AuthenticationError):
        sampler.sample(
            prompt, num_samples=1, sampling_params=tinker.SamplingParams(max_tokens=1)
        ).result(timeout=60)
    assert answered(gate, 401) - before <= 4, "the sample, an exchange, and what runs beside"
    service.holder.close()  # it may not end its session


def answered(gate, status: int) -> float:
    return sum(
        sample.value
        for metric in gate.gateway.metrics.requests.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.labels["status"] == str(status)
    )


def test_the_command_works_with_a_gateway_and_without_one(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def tandem(*arguments: str):
        done = CliRunner().invoke(app, ["keys", *arguments, "--data-dir", str(tmp_path / "data")])
        assert done.exception is None, done.exception
        return done.stdout

    def said(*arguments: str):
        return json.loads(tandem(*arguments, "--json"))

    monkeypatch.setenv("TANDEM_DATABASE_URL", url_for(tmp_path / "data"))
    (tmp_path / "data").mkdir(mode=0o755)
    before = said("create", "--owner", "ann", "--expires", "30d")
    files = [path for path in (tmp_path / "data").iterdir() if path.is_file()]
    assert files and not any(path.stat().st_mode & 0o077 for path in files)
    assert (before["owner"], before["role"], before["state"]) == ("ann", "member", "active")
    with running_gateway(tmp_path, session_ttl=600) as gate:
        with gate.http(before["key"]) as client:
            assert client.get("/api/v1/sessions").status_code == 200
        made = said("create", "--owner", "ben", "--role", "reader", "--name", "x")
        assert made["id"] in tandem("list")
        assert made["key"] not in tandem("list")
        assert "revoked" in tandem("revoke", before["id"])
        with gate.http(before["key"]) as client:
            assert client.get("/api/v1/sessions").status_code == 401
    assert said("revoke", made["id"])["state"] == "revoked"
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as client:
        entries = audit_log(client)
        lines = [(e["event"], e["event_details"]["target"]) for e in entries]
        assert [line for line in lines if line[0].startswith("apikey")] == [
            ("apikey_create", before["id"]),
            ("apikey_create", made["id"]),
            ("apikey_delete", before["id"]),
            ("apikey_delete", made["id"]),
        ]
        assert made["key"] not in json.dumps(entries)
    states = {k["id"]: k["state"] for k in said("list")["keys"]}
    assert states == {before["id"]: "revoked", made["id"]: "revoked"}
    with pytest.raises(AssertionError, match="no key 'k-7'"):
        tandem("revoke", "k-7")


@pytest.fixture
def gateway(tmp_path):
    def open_gateway(host: str) -> AbstractAsyncContextManager[Gateway]:
        settings = settings_for(tmp_path, host=host, playground=PlaygroundSettings(runs=1))
        epoch = Epoch(number=1, superseded=lambda: None)
        return Gateway.open(
            settings, launchers=for_each_kind(FakeLauncher()), metrics=Metrics(), epoch=epoch
        )

    return open_gateway


async def test_only_a_gateway_with_a_key_for_others_listens_where_others_reach_it(gateway):
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(InvalidRequest, match="tandem keys create --owner NAME"):
            async with gateway(host):
                pass
    async with gateway("127.0.0.1") as first:
        key, _ = await first.keys.create(new())
    async with gateway("0.0.0.0") as second:
        await second.keys.revoke(key.id)
    with pytest.raises(InvalidRequest):
        async with gateway("0.0.0.0"):
            pass


async def test_the_keys_of_a_trial_and_of_a_sign_in_open_no_gateway_to_others(gateway, tmp_path):
    async with gateway("127.0.0.1") as first:
        await first.models.add(name="tiny", path=str(make_model(tmp_path / "tiny")))
        local = Caller(owner="local", key_id=first.keys.all()[0].id, role="admin")
        await first.playground.start_trial(local, **ASKED, values={}, seed=0)
        claim = await first.playground.claim_trial()
        [key] = [each for each in first.keys.all() if not each.local]
        assert (key.name, first.keys.ended(key)) == (claim.trial.id, None)
        about = {"owner": "ann", "named": False, "role": "admin", "seconds": 3600}
        await first.keys.grant("a-person", **about)
    with pytest.raises(InvalidRequest, match="has no valid key but the local one"):
        async with gateway("0.0.0.0"):
            pass


def test_the_bootstrap_key_opens_a_gateway_to_others_and_is_shown_nowhere(tmp_path, monkeypatch):
    secret, file = f"tml-{'a' * 32}", tmp_path / "secret"
    file.write_text(f"{secret}\n")
    with (
        capture_logs() as lines,
        running_gateway(tmp_path, host="0.0.0.0", bootstrap_key_file=file) as gate,
        gate.http(secret) as admin,
    ):
        shown = [admin.get(f"{OWN}/{path}").text for path in ("config", "keys", "status")]
        audit = audit_log(admin, event_type="organizations")
        made = next(k for k in json.loads(shown[1])["keys"] if k["name"] == "bootstrap-key")
        assert (made["owner"], made["role"], made["state"]) == ("local", "admin", "active")
        assert [e["event"] for e in audit if made["id"] in json.dumps(e)] == ["apikey_create"]
        assert secret not in json.dumps([*shown, audit, lines])
    monkeypatch.setenv("TANDEM_BOOTSTRAP_KEY_FILE", str(file))
    for arguments in (["config"], ["config", "--json"]):
        said = CliRunner().invoke(app, arguments)
        assert said.exit_code == 0
        assert "launcher" in said.stdout.lower()
        assert secret not in said.stdout


def test_uses_reach_the_database_while_the_gateway_runs(gate):
    key, secret = gate.run(gate.gateway.keys.create(new()))
    with gate.http(secret) as client:
        client.get("/api/v1/sessions")

    async def last_used():
        row = await gate.gateway.database.read_one(select(table).where(table.c.id == key.id))
        return row["last_used_at"]

    wait_until(lambda: gate.run(last_used()))
