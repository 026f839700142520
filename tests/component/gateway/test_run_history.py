"""The optimizer steps of a run, stored and listed."""

from __future__ import annotations

import json
import re

import pytest
from tinker import types

from gateway.runs.record.rows import TrainingStep
from tandem.errors import UnknownRun
from tests.support.gateway.access_world import Call

OWN = "/api/tandem/v1"
INPUT = types.ModelInput.from_ints([1, 2, 3, 4])
DATUM = types.Datum(
    model_input=INPUT,
    loss_fn_inputs={
        "target_tokens": types.TensorData(data=[2, 3, 4, 5], dtype="int64", shape=[4]),
        "weights": types.TensorData(data=[1.0] * 4, dtype="float32", shape=[4]),
    },
)


@pytest.fixture
def trained(training):
    """Three steps, a version after the first, and a forward at the end."""
    for number in range(3):
        for _ in range(number + 1):
            training.forward_backward([DATUM], "cross_entropy")
        training.optim_step(types.AdamParams()).result()
        if number == 0:
            training.save_weights_for_sampler("first").result()
    training.forward([DATUM], "cross_entropy").result()
    return training.model_id


def test_each_step_is_kept_with_the_metrics_tokens_and_seconds_of_its_batches(gate, trained):
    with gate.http() as client:
        answer = client.get(f"{OWN}/runs/{trained}/steps").json()
    steps = answer["steps"]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["tokens"] for step in steps] == [4, 8, 12]
    assert [step["metrics"]["loss:sum"] for step in steps] == [8.0, 8.0, 8.0]
    assert {step["metrics"]["grad_norm"] for step in steps} == {1.5}
    assert {step["seconds"] for step in steps} == {0.75}
    assert steps[0]["weight_version"] == ""
    assert {step["weight_version"].partition("-")[0] for step in steps[1:]} != {""}
    assert len({step["weight_version"] for step in steps[1:]}) == 1
    assert answer["run"]["last_step"] == steps[-1] and answer["before"] is None


def test_older_steps_are_asked_for_by_what_the_newer_ones_say(gate, trained):
    found, before = [], None
    with gate.http() as client:
        for _ in range(3):
            where = f"{OWN}/runs/{trained}/steps?limit=1" + (f"&before={before}" if before else "")
            answer = client.get(where).json()
            found += [step["step"] for step in answer["steps"]]
            before = answer["before"]
    assert found == [3, 2, 1] and before is None


def test_a_run_is_listed_with_its_last_step_and_one_without_steps_too(gate, trained):
    empty = gate.run_id(gate.session_id())
    with gate.http() as client:
        rows = {run["id"]: run for run in client.get(f"{OWN}/runs?limit=1000").json()["runs"]}
    assert rows[trained]["last_step"]["step"] == 3 and rows[trained]["base_model"] == "tiny"
    assert rows[empty]["last_step"] is None and rows[empty]["lora_rank"] is None
    assert [rows[empty][name] for name in ("ranks", "replicas", "tensor_parallel")] == [1, 1, 1]
    assert rows[trained]["state"] == rows[empty]["state"] == "active"


def test_a_metric_that_is_not_finite_is_recorded_as_no_number(gate, training):
    step = {"run_id": training.model_id, "at": 1.0, "seconds": 1.0, "tokens": 1}
    row = TrainingStep(**step, seq_id=1, step=1, weight_version="", metrics={"loss": float("nan")})
    gate.run(lambda: gate.gateway.run_records.record_step(row))
    with gate.http() as client:
        (told,) = client.get(f"{OWN}/runs/{training.model_id}/steps").json()["steps"]
    assert told["metrics"] == {"loss": None}


def test_the_commands_list_and_show_runs_with_charts(trained, tandem):
    listed = tandem("runs", "list")
    row = next(line for line in listed.splitlines() if trained in line)
    assert row.split()[:5] == [trained, "active", "3", "loss", "0.6667"]
    shown = tandem("runs", "show", trained)
    assert f"{trained}: tiny, all parameters, owner local" in shown
    assert "\nloss, steps 1 to 3: 2 → 0.6667" in shown and "█" in shown
    assert re.search(r"^where the time went: \w+ \d+ %", shown, re.MULTILINE)
    assert "grad_norm, steps 1 to 3: 1.5 → 1.5" in shown
    assert "for 2048 tokens at once, with checkpointed blocks" in shown
    assert "device: 8 of 9 MiB (activations 5, weights 3)" in shown
    told = json.loads(tandem("runs", "show", trained, "--json"))
    assert told["steps"][0]["step"] == 1 and told["memory"]["device"]["weights"] == 3 * 2**20
    with pytest.raises(UnknownRun, match="there is no training run"):
        tandem("runs", "show", "s-000000000000:train:0")


def test_a_run_without_steps_says_so(gate, tandem):
    assert "No optimizer steps." in tandem("runs", "show", gate.run_id(gate.session_id()))


def test_a_published_checkpoint_shows_nobody_the_steps_of_its_run(world):
    path = world.copy()
    run = path.removeprefix("tinker://").partition("/")[0]

    assert world.ask(
        "POST", Call(f"{world.checkpoint(path)}/publish"), key=world.keys["member"]
    ).is_success
    call = Call(f"{OWN}/runs/{run}/steps")
    assert world.ask("GET", call, key=world.keys["foreign"]).status_code == 404
    assert world.ask("GET", call, key=world.keys["member"]).status_code == 200
