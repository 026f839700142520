"""Where the time of each optimizer step went, as the gateway records it."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise

import pytest
from tinker import types

from tests.support.waiting import wait_until

OWN = "/api/tandem/v1"
PROMPT = types.ModelInput.from_ints([1, 2, 3, 4])
DATUM = types.Datum(
    model_input=PROMPT,
    loss_fn_inputs={
        "target_tokens": types.TensorData(data=[2, 3, 4, 5], dtype="int64", shape=[4]),
        "weights": types.TensorData(data=[1.0] * 4, dtype="float32", shape=[4]),
    },
)


def steps_of(gate, run_id: str) -> list[dict]:
    with gate.http() as client:
        return client.get(f"{OWN}/runs/{run_id}/steps").json()["steps"]


def seconds_of(step: dict) -> dict[str, float]:
    found = {name: value for name, value in step["metrics"].items() if name.startswith("seconds/")}
    return {name.removeprefix("seconds/"): value for name, value in found.items()}


def seconds_between(before: dict, after: dict) -> float:
    apart = datetime.fromisoformat(after["at"]) - datetime.fromisoformat(before["at"])
    return apart.total_seconds()


def test_the_shares_of_each_step_add_up_to_the_time_since_the_last_one(gate, training):
    sampling = training.save_weights_and_get_sampling_client().result()
    for _ in range(3):
        sampling.sample(PROMPT, 2, types.SamplingParams(max_tokens=4)).result()
        training.forward_backward([DATUM], "cross_entropy").result()
        training.optim_step(types.AdamParams()).result()
        sampling = training.save_weights_and_get_sampling_client().result()
    steps = steps_of(gate, training.model_id)
    for step in steps:
        seconds = seconds_of(step)
        whole = seconds.pop("step")
        assert len(seconds) == 8 and min(seconds.values()) >= 0
        assert sum(seconds.values()) == pytest.approx(whole)
    for before, after in pairwise(steps):
        wall = seconds_between(before, after)
        assert seconds_of(after)["step"] == pytest.approx(wall, rel=0.03, abs=0.02)
    assert [step["metrics"]["staleness"] for step in steps] == [0, 0, 0]
    name = "tandem/seconds/step"

    def recorded() -> dict[str, list]:
        with gate.http() as client:
            where = f"{OWN}/runs/{training.model_id}/metrics?name={name}"
            return client.get(where).json()["metrics"].get(name, {"step": []})

    wait_until(lambda: recorded()["step"] == [1, 2, 3])
    assert recorded()["value"] == pytest.approx([seconds_of(step)["step"] for step in steps])
    spent = [seconds_of(step) for step in steps]
    assert spent[0]["place"] > 0, "the trainer and the engine started"
    for name in ("samples", "compute", "client"):
        assert all(seconds[name] > 0 for seconds in spent), name


def test_samples_of_older_weights_are_stale(gate, training):
    sampling = training.save_weights_and_get_sampling_client().result()
    for _ in range(3):
        sampling.sample(PROMPT, 1, types.SamplingParams(max_tokens=4)).result()
        training.forward_backward([DATUM], "cross_entropy").result()
        training.optim_step(types.AdamParams()).result()
    staleness = [step["metrics"].get("staleness") for step in steps_of(gate, training.model_id)]
    assert staleness == [0, 1, 2]
