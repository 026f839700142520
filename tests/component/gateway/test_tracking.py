"""`tandem.track` and `tandem runs export` with a gateway."""

from __future__ import annotations

import csv
import json
import math
from functools import partial

import pytest

import tandem
from tandem.errors import UnknownRun, UserError
from tandem.stack import Stack
from tests.component.gateway.test_run_history import DATUM, types
from tests.support.gateway.running import KEY, running_gateway
from tests.unit.tandem.test_tracking import Kept

OWN = "/api/tandem/v1"


@pytest.fixture
def export(tandem):
    return partial(tandem, "runs", "export")


def test_a_run_has_its_name_tags_and_configuration(gate, training):
    with tandem.track(training, name="sums", tags=["a", "b"], config={"total_steps": 4}) as run:
        run.log(1, {"reward": 0.5})
    with gate.http() as client:
        told = client.get(f"{OWN}/runs/{training.model_id}").json()
    assert (told["name"], told["tags"]) == ("sums", ["a", "b"])
    assert told["config"] == {"total_steps": 4} and told["progress"]["percent"] == 25.0


def test_an_unknown_run_and_a_long_name_are_refused_before_the_loop(gate, training):
    with pytest.raises(UnknownRun):
        tandem.track("s-000000000000:train:0", url=gate.url, api_key=KEY)
    with pytest.raises(UserError, match="201 characters"):
        tandem.track(training, name="x" * 201)


def test_an_exporter_gets_the_steps_of_the_optimizer_beside_the_users(training):
    kept = Kept()
    with tandem.track(training, to=[kept]) as run:
        run.log(7, {"reward": math.inf})
        for _ in range(2):
            training.forward_backward([DATUM], "cross_entropy")
            training.optim_step(types.AdamParams()).result()
    mine = [row for row in kept.rows if row.source == "user"]
    assert [(row.step, row.values) for row in mine] == [(7, {"reward": math.inf})]
    servers = [row for row in kept.rows if row.source == "tandem"]
    assert {row.step for row in servers} == {1, 2}
    assert all(name.startswith("tandem/") for row in servers for name in row.values)


def test_all_metrics_and_rollouts_are_exported(training, export, tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.runs.record.store._STEPS", 4)
    run_id = training.model_id
    with tandem.track(training, name="exported") as run:
        for step in range(15):
            run.log(step, {"reward": step / 2, **({"late": math.nan} if step == 3 else {})})
            run.rollouts(step, [{"answer": f"{step}\n", "tokens": [1, 2]}] * (1 + 3 * (step == 9)))
    rows = [json.loads(line) for line in export(run_id).splitlines()]
    mine = [row for row in rows if row["source"] == "user"]
    assert [row["step"] for row in mine] == [*range(15)]
    assert mine[3]["values"] == {"reward": 1.5, "late": "NaN"} and mine[3]["at"] > 1e9

    assert export(run_id, "--format", "csv", "-o", tmp_path / "m.csv") == ""
    with (tmp_path / "m.csv").open(newline="") as file:
        table = [row for row in csv.DictReader(file) if row["source"] == "user"]
    assert (table[3]["step"], table[3]["reward"], table[3]["late"]) == ("3", "1.5", "NaN")
    assert table[4]["late"] == "" and len(table) == 15

    told = [json.loads(line) for line in export(run_id, "--rollouts").splitlines()]
    assert [row["step"] for row in told] == sorted([*range(15), 9, 9, 9])
    assert told[0]["answer"] == "0\n" and [row["index"] for row in told[9:13]] == [0, 1, 2, 3]
    export("exported", "--rollouts", "--format", "csv", "-o", tmp_path / "r.csv")
    with (tmp_path / "r.csv").open(newline="") as file:
        table = [*csv.DictReader(file)]
    assert len(table) == 18 and (table[5]["answer"], table[5]["tokens"]) == ("5\n", "[1,2]")
    assert [*tmp_path.glob("*.partial")] == []


@pytest.mark.slow
def test_rows_logged_while_the_gateway_is_killed_and_restarted_all_arrive_once(tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate:
        run_id = gate.run_id(gate.session_id())
    settings = {"port": "0", "api_key": KEY}
    with Stack(data_dir=gate.settings.data_dir, settings=settings) as stack:
        with tandem.track(run_id, url=stack.endpoint.url, api_key=KEY) as run:
            for step in range(300):
                run.log(step, {"reward": step / 2})
                run.rollouts(step, [{"answer": str(step), "reward": 1.0}])
                if step == 100:
                    assert run.flush(timeout=60)
                    stack.process.kill()
            assert run.flush(timeout=60) and run.dropped == 0
        with stack.client() as client:
            curve = client.get(f"runs/{run_id}/metrics").json()["metrics"]["reward"]
            steps = client.get(f"runs/{run_id}/rollouts").json()["steps"]
    assert curve["step"] == [*range(300)]
    assert curve["value"] == [step / 2 for step in range(300)]
    assert [(each["step"], each["count"]) for each in steps] == [(n, 1) for n in range(300)]
