"""GET /logs: each owner's lines, and no others."""

from __future__ import annotations

from functools import partial

import pytest

from gateway.owners.auth.keys import NewKey
from tandem.errors import UnknownRun
from tests.support.gateway.running import Gate, running_gateway
from tests.unit.tandem.test_log_lines import first, line, write

OWN = "/api/tandem/v1"


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    with running_gateway(tmp_path_factory.mktemp("logs"), session_ttl=600) as gate:
        yield gate


@pytest.fixture
def owners(gate: Gate) -> dict[str, tuple[str, str]]:
    """The key and a session of two owners, with lines about each in the gateway's log."""
    found = {}
    for number, owner in enumerate(("ann", "ben")):
        key = gate.run(gate.gateway.keys.create(NewKey(owner=owner, role="member")))[1]
        session = gate.session_id(key)
        found[owner] = (key, session)
        folder, run = gate.settings.data_dir / "logs", f"{session}:train:0"
        path = str(gate.settings.data_dir / "weights")
        write(folder, "gateway", line(number, "worker_ready", run_id=run, owner=owner, path=path))
        write(folder, f"trainer-{session}-0", first("trainer", session, run), f"fault of {owner}")
    return found


def test_an_owner_reads_own_lines_without_paths_and_an_admin_all(gate, owners):
    key, session = owners["ann"]
    with gate.http(key) as client:
        own = client.get(f"{OWN}/logs?limit=10000").json()
        files = client.get(f"{OWN}/logs/files").json()["logs"]
    with gate.http() as client:
        whole = client.get(f"{OWN}/logs?limit=10000").json()
        every = client.get(f"{OWN}/logs/files").json()["logs"]
    texts = "\n".join(each["text"] for each in own["lines"])
    assert "fault of ann" in texts and session in texts
    assert "ben" not in texts and owners["ben"][1] not in texts
    assert str(gate.settings.data_dir) not in texts
    assert [each["log"] for each in files] == [f"trainer-{session}-0"]
    everything = "\n".join(each["text"] for each in whole["lines"])
    assert "fault of ben" in everything and str(gate.settings.data_dir) in everything
    assert {"gateway", f"trainer-{session}-0"} <= {each["log"] for each in every}


def test_another_owner_s_run_and_request_are_unknown(gate, owners):
    run = f"{owners['ann'][1]}:train:0"
    with gate.http(owners["ben"][0]) as client:
        for query, type_ in (
            (f"run={run}", "unknown_run"),
            (f"request={run}:1", "unknown_request"),
        ):
            answer = client.get(f"{OWN}/logs?{query}")
            assert (answer.status_code, answer.json()["type"]) == (404, type_)
        other = client.get(f"{OWN}/logs?log=trainer-{owners['ann'][1]}-0").json()
    assert other == {"lines": [], "cut": False}


def test_the_command_reads_them_from_elsewhere(owners, tandem, tmp_path):
    key, session = owners["ann"]
    logs = partial(tandem, "logs", key=key)
    assert f"trainer-{session}-0" in logs()
    said = logs("--run", f"{session}:train:0")
    assert f"gateway: worker_ready {session}:train:0 owner=ann" in said
    assert logs(f"trainer-{session}-0", "-n", "1") == "fault of ann\n"
    with pytest.raises(UnknownRun):
        logs("--run", f"{owners['ben'][1]}:train:0")
    with pytest.raises(ValueError, match="there is no log of"):
        logs("gateway-2")
    assert not list(tmp_path.iterdir())
