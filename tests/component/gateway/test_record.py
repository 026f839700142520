"""The record of a run over REST: identity, metrics, curves and rollouts."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import uuid

import pytest
from tinker import types

from gateway.admin.backup import back_up, restore
from gateway.storage.retention import Retention
from tandem.errors import StorageFailed
from tests.support.gateway.access_world import Call
from tests.support.gateway.running import running_gateway
from tests.support.waiting import wait_until

RUNS = "/api/tandem/v1/runs"
HOSTILE = "GRPO <script>alert(1)</script> 😀 \x1b[31m \u202e"
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2, 3, 4]),
    loss_fn_inputs={
        "target_tokens": types.TensorData(data=[2, 3, 4, 5], dtype="int64", shape=[4]),
        "weights": types.TensorData(data=[1.0] * 4, dtype="float32", shape=[4]),
    },
)


@pytest.fixture
def client(gate):
    with gate.http() as client:
        yield client


def new_run(gate, **metadata):
    with gate.service() as service:
        made = service.create_lora_training_client("tiny:full", user_metadata=metadata or None)
        return made.result().model_id


def ok(answer):
    assert answer.is_success, answer.text
    return answer.json()


def log(client, run, *rows, **query):
    body = {"rows": [{"step": step, "values": values} for step, values in rows]}
    return ok(client.post(f"{RUNS}/{run}/metrics", json=body, params=query))


def curves(client, run, *names, **query):
    params = {"name": list(names), **query}
    return ok(client.get(f"{RUNS}/{run}/metrics", params=params))["metrics"]


def add_rollouts(client, run, step, *rollouts, batch=""):
    body = {"batch": batch or uuid.uuid4().hex, "step": step, "rollouts": rollouts}
    return ok(client.post(f"{RUNS}/{run}/rollouts", json=body))


def test_a_run_has_the_name_tags_and_config_of_its_user_metadata(gate, client):
    config = {"lr": 1e-4, "total_steps": 10}
    run = new_run(gate, name=HOSTILE, tags="a,b", config=json.dumps(config), other="kept")
    told = ok(client.get(f"{RUNS}/{run}"))
    assert (told["name"], told["tags"], told["config"]) == (HOSTILE, ["a", "b"], config)
    assert (told["user_metadata"], told["parent_run"]) == ({"other": "kept"}, None)
    assert (told["progress"], told["last"]) == (None, {})
    (row,) = ok(client.get(RUNS, params={"name": "grpo <SCRIPT", "tag": "b"}))["runs"]
    assert row["name"] == HOSTILE and "config" not in row


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"name": "Ä%_x"}, True),
        ({"name": "Ä%x"}, False),
        ({"tag": "c, d"}, True),
        ({"tag": 'say "e"'}, True),
        ({"tag": "e"}, False),
        ({"tag": "C, D"}, False),
        ({"state": "active"}, False),
        ({"state": "ended"}, True),
        ({"owner": "local"}, True),
        ({"owner": "somebody"}, False),
    ],
)
def test_runs_are_filtered(gate, client, query, found):
    run = new_run(gate, name="Ä%_x", tags='["c, d", "say \\"e\\""]')
    wait_until(lambda: ok(client.get(f"{RUNS}/{run}"))["state"] == "ended")
    listed = ok(client.get(RUNS, params={**query, "limit": 1000}))
    assert (run in [row["id"] for row in listed["runs"]]) == found


def test_a_run_is_renamed_after_its_end_and_keeps_the_other_fields(gate, client):
    run = new_run(gate, name="first", tags="a", other="kept")
    change = {"name": "second", "config": {"x": [1]}, "user_metadata": {"new": "key"}}
    told = ok(client.patch(f"{RUNS}/{run}", json=change))
    assert (told["name"], told["tags"], told["config"]) == ("second", ["a"], {"x": [1]})
    assert told["user_metadata"] == {"other": "kept", "new": "key"}
    told = ok(client.patch(f"{RUNS}/{run}", json={"tags": None, "user_metadata": {"new": None}}))
    assert (told["tags"], told["user_metadata"]) == ([], {"other": "kept"})
    entries = ok(client.get("/api/v1/audit"))["entries"]
    details = [one["event_details"] for one in entries if one["event"] == "run_change"]
    assert (details[-1]["target"], details[-1]["changed"]) == (run, "tags, user_metadata")


@pytest.mark.parametrize(
    "change",
    [
        {"name": "x" * 201},
        {"tags": ["x"] * 51 + [str(number) for number in range(51)]},
        {"config": {"x": "y" * 2**16}},
        {"config": []},
        {"config": {"x": 2**64}},
        {"config": json.loads('{"x":' * 300 + "1" + "}" * 300)},
        {"user_metadata": {"tandem.ranks": "2"}},
        {"user_metadata": {"name": "x"}},
        {"user_metadata": {"x": "y" * 2**14}},
    ],
)
def test_a_change_beyond_the_limits_is_refused(gate, client, change):
    answer = client.patch(f"{RUNS}/{new_run(gate)}", json=change)
    assert answer.status_code == 400, answer.text


def test_metrics_are_curves_in_the_order_of_steps(gate, client):
    run = new_run(gate, config='{"total_steps": 4}')
    assert log(client, run, (0, {"reward": 0.25, HOSTILE: 1}))["rows"] == 1
    log(client, run, (2, {"reward": "NaN"}), (1, {"reward": "-Infinity"}), (3, {"loss": 2}))
    found = curves(client, run)
    assert found["reward"]["step"] == [0, 1, 2]
    assert found["reward"]["value"] == [0.25, "-Infinity", "NaN"]
    assert found["loss"]["value"] == [2.0] and found[HOSTILE]["value"] == [1.0]
    assert curves(client, run, "loss", "none").keys() == {"loss"}
    told = ok(client.get(f"{RUNS}/{run}"))
    assert told["last"] == {"reward": "-Infinity", HOSTILE: 1.0, "loss": 2.0}
    assert told["progress"]["step"] == 3 and told["progress"]["percent"] == 100


def test_the_last_row_of_a_step_counts_for_each_name(gate, client):
    run = new_run(gate)
    log(client, run, (5, {"a": 1, "b": 1}), (5, {"a": 2}))
    log(client, run, (4, {"a": 0}), (5, {"a": 3}))
    found = curves(client, run)
    assert (found["a"]["step"], found["a"]["value"]) == ([4, 5], [0.0, 3.0])
    assert found["b"]["value"] == [1.0]


def test_rows_beyond_a_limit_are_dropped_and_counted(gate, client):
    run = new_run(gate)
    told = log(
        client,
        run,
        (1, {f"n{number}": 1 for number in range(201)}),
        (1, {"x" * 201: 1}),
        (1, {"tandem/loss": 1}),
        (1, {"fine": 1}),
    )
    assert (told["rows"], told["dropped"]) == (1, 3) and "tandem/" in told["why"]
    assert curves(client, run).keys() == {"fine"}
    large, wide, deep = {"answer": "x" * 2**20}, {"seed": 2**64}, []
    for _ in range(150):
        deep = [deep]
    told = add_rollouts(client, run, 1, {"answer": "y"}, large, wide, {"deep": deep})
    assert (told["rollouts"], told["dropped"]) == (2, 2) and "1 MiB" in told["why"]
    assert ok(client.get(f"{RUNS}/{run}/rollouts"))["rollouts"][1]["deep"] == deep


def test_a_name_with_a_zero_character_is_kept_without_it(gate, client):
    run = new_run(gate, name="a\0b", tags='["t\\u0000"]', config='{"k\\u0000": "v\\u0000"}')
    told = ok(client.get(f"{RUNS}/{run}"))
    assert (told["name"], told["tags"]) == ("a\ufffdb", ["t\0"])
    assert log(client, run, (1, {"n\0": 1}))["rows"] == 1
    assert add_rollouts(client, run, 1, {"k\0": "v\0"}, batch="b\0")["rollouts"] == 1
    assert add_rollouts(client, run, 1, {"k\0": "v\0"}, batch="b\0")["rollouts"] == 1
    assert ok(client.get(f"{RUNS}/{run}/rollouts"))["rollouts"][0]["k\0"] == "v\0"
    assert curves(client, run).keys() == {"n\0"}


def test_the_server_logs_each_optimizer_step_and_tells_the_client(gate, client):
    with gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        for _ in range(2):
            training.forward_backward([DATUM], "cross_entropy")
            training.optim_step(types.AdamParams()).result()
        run = training.model_id
    wait_until(lambda: len(curves(client, run).get("tandem/tokens", {}).get("step", [])) == 2)
    assert curves(client, run)["tandem/tokens"]["value"] == [4.0, 4.0]
    assert ok(client.get(f"{RUNS}/{run}"))["progress"]["step"] == 2
    told = log(client, run, server_after="0")
    assert [row["step"] for row in told["server_rows"]] == [1, 2]
    assert told["server_rows"][0]["values"]["tandem/grad_norm"] == 1.5
    assert log(client, run, server_after=told["server_cursor"])["server_rows"] == []
    assert log(client, run, (0, {"reward": 1}))["server_rows"] == []
    assert ok(client.get(f"{RUNS}/{run}"))["progress"]["step"] == 0  # the user counts now


@pytest.mark.parametrize("fault", [StorageFailed("no disk"), None])
def test_rows_are_stored_although_the_servers_rows_cannot_be_read(gate, client, monkeypatch, fault):
    async def read(*_: object, **_options: object) -> None:
        if fault is not None:
            raise fault
        await asyncio.Event().wait()

    run = new_run(gate)
    monkeypatch.setattr(gate.gateway.record, "rows_after", read)
    monkeypatch.setattr("gateway.api.tandem.record._READ_SECONDS", 0.1)
    told = log(client, run, (1, {"reward": 1}), server_after="1-0-7")
    assert (told["rows"], told["server_rows"], told["server_cursor"]) == (1, [], "1-0-7")


def test_rollouts_are_read_by_step_reward_and_text(gate, client):
    run = new_run(gate)
    first = [{"prompt": "p", "answer": f"a{n}", "reward": n, "tokens": [n]} for n in (2, 3, 1)]
    assert add_rollouts(client, run, 1, *first)["rollouts"] == 3
    add_rollouts(client, run, 1, {"answer": HOSTILE, "extra": {"deep": ["Needle"]}})
    add_rollouts(client, run, 7, {"answer": "newest", "reward": "NaN"})

    def page(**query):
        return ok(client.get(f"{RUNS}/{run}/rollouts", params=query))

    newest = page()
    assert newest["step"] == 7 and newest["rollouts"][0]["answer"] == "newest"
    assert [(s["step"], s["count"], s["reward_mean"]) for s in newest["steps"]] == [
        (1, 4, 2.0),
        (7, 1, None),
    ]
    answers = [one["answer"] for one in page(step=1, order="-reward")["rollouts"]]
    assert answers == ["a3", "a2", "a1", HOSTILE]
    found = page(step=1, order="reward", limit=1, offset=1)
    assert (found["rollouts"][0]["index"], found["total_count"]) == (0, 4)
    found = page(step=1, search="nEEDLE")
    assert [one["index"] for one in found["rollouts"]] == [3] and found["total_count"] == 1
    assert page(step=99)["rollouts"] == []


def test_without_a_reward_metric_the_curve_is_the_mean_of_the_rollouts(gate, client):
    run = new_run(gate)
    add_rollouts(client, run, 1, {"reward": 1}, {"reward": 0})
    add_rollouts(client, run, 1, {"reward": 1}, {"reward": 1}, {"answer": "none"})
    wait_until(lambda: curves(client, run).get("tandem/reward", {}).get("value") == [0.75])


def test_a_resumed_run_names_its_parent_and_continues_its_curves(gate, client):
    with gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        first = training.model_id
        for _ in range(2):
            training.forward_backward([DATUM], "cross_entropy")
            training.optim_step(types.AdamParams()).result()
        state = training.save_state("state").result().path
        log(client, first, *((step, {"reward": step}) for step in range(5)))
        continued = service.create_training_client_from_state_with_optimizer(state).result()
        resumed = continued.model_id
        told = ok(client.get(f"{RUNS}/{resumed}"))
        assert (told["parent_run"], told["parent_step"]) == (first, 2)
        found = curves(client, resumed, "reward", lineage=True)["reward"]
        assert found["value"] == [0, 1, 2]  # until the state's optimizer step
        log(client, resumed, (4, {"reward": 40}), (5, {"reward": 50}))
    found = curves(client, resumed, "reward", lineage=True)["reward"]
    assert (found["step"], found["value"]) == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 40, 50])
    assert curves(client, resumed)["reward"]["step"] == [4, 5]
    assert run_json(gate, resumed)["parent_run"] == first


def run_json(gate, run):
    folder = gate.settings.data_dir / "runs" / run.replace(":", "_") / "record"
    return json.loads((folder / "run.json").read_text())


def test_a_file_beside_the_rows_tells_what_the_run_is(gate, client):
    run = new_run(gate, name=HOSTILE, tags="a", config='{"lr": 1}')
    wait_until(lambda: run_json(gate, run)["state"] == "ended")
    told = run_json(gate, run)
    assert (told["name"], told["tags"], told["config"]) == (HOSTILE, ["a"], {"lr": 1})
    assert (told["id"], told["base_model"], told["owner"]) == (run, "tiny", "local")
    ok(client.patch(f"{RUNS}/{run}", json={"name": "new"}))
    wait_until(lambda: run_json(gate, run)["name"] == "new")


def test_a_record_is_removed_with_its_run(gate, client):
    run = new_run(gate)
    log(client, run, (1, {"a": 1}))
    add_rollouts(client, run, 1, {"answer": "a"})
    wait_until(lambda: run_json(gate, run)["state"] == "ended")
    folder = gate.settings.data_dir / "runs" / run.replace(":", "_")
    old = Retention(
        database=gate.gateway.database, data_dir=gate.settings.data_dir, history_ttl=-1.0
    )
    gate.run(old.remove_old())
    assert not folder.exists() and client.get(f"{RUNS}/{run}").status_code == 404
    assert client.get(f"{RUNS}/{run}/rollouts").status_code == 404


def test_another_owner_sees_nothing(world):
    body = {"rows": [{"step": 1, "values": {"secret": 1}}]}
    call = Call(f"{RUNS}/{world.run}/metrics", body)
    assert world.ask("POST", call, key=world.keys["member"]).is_success
    with world.client(world.keys["foreign"]) as foreign:
        assert ok(foreign.get(RUNS)) == {"runs": [], "total_count": 0}
        assert ok(foreign.get(RUNS, params={"owner": "ann"}))["runs"] == []
        for path in ("", "/metrics?lineage=true", "/rollouts"):
            answer = foreign.get(f"{RUNS}/{world.run}{path}")
            assert (answer.status_code, answer.json()["type"]) == (404, "unknown_run")


def test_rows_outlive_a_restart_of_the_gateway(tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as client:
        run = new_run(gate, name="kept")
        log(client, run, (1, {"a": 1}))
        add_rollouts(client, run, 1, {"answer": "one"}, batch="one")
    folder = gate.settings.data_dir / "runs" / run.replace(":", "_") / "record"
    with next(folder.glob("metrics-*")).open("ab") as file:
        file.write(b'{"step":2,"at":1,"source":"us')  # torn by a crash
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as client:
        assert add_rollouts(client, run, 1, {"answer": "one"}, batch="one")["rollouts"] == 1
        add_rollouts(client, run, 1, {"answer": "two"})
        log(client, run, (3, {"a": 3}))
        assert curves(client, run)["a"]["step"] == [1, 3]
        found = ok(client.get(f"{RUNS}/{run}/rollouts"))["rollouts"]
        assert [one["answer"] for one in found] == ["one", "two"]
        assert ok(client.get(f"{RUNS}/{run}"))["name"] == "kept"
    assert len(list(folder.glob("metrics-*"))) == len(list(folder.glob("rollouts-*"))) == 2


ON_POSTGRESQL = os.environ.get("TANDEM_TEST_DATABASE") == "postgresql"


@pytest.mark.skipif(ON_POSTGRESQL, reason="its own tools restore PostgreSQL")
def test_a_backup_brings_the_records_back_and_removes_nothing(tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as client:
        run, later = new_run(gate), new_run(gate)
        log(client, run, (1, {"a": 1}))
        add_rollouts(client, run, 1, {"answer": "one"})
        back_up(tmp_path / "backup", gate.settings)
        log(client, run, (2, {"a": 2}))
        unknown = new_run(gate)
        log(client, unknown, (1, {"a": 1}))
        wait_until(lambda: run_json(gate, unknown))
    data_dir = gate.settings.data_dir
    shutil.rmtree(data_dir / "runs" / later.replace(":", "_"))
    restored = asyncio.run(restore(tmp_path / "backup", gate.settings))
    assert restored.unknown == [f"runs/{unknown.replace(':', '_')}"]
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as client:
        assert curves(client, run)["a"]["value"] == [1, 2]
        assert ok(client.get(f"{RUNS}/{run}/rollouts"))["total_count"] == 1
        assert run_json(gate, later)["id"] == later
