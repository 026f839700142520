"""GPU measurements run completely on cores, except for the device."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.goals import GOALS, goal_table, judged
from benchmarks.gpu.memory import compared
from benchmarks.gpu.plan import PLAN, planned
from benchmarks.gpu.sizes import SIZES, flops, parameters_of
from benchmarks.gpu.workers import Bench, elsewhere
from tandem.agent.host import accelerators, this_host
from tandem.protocol.devices import Device
from tandem.v1 import trainer_pb2
from tests.gpu.__main__ import main as run_gpu_tests

pytestmark = pytest.mark.slow


def found(*parts: str, output: Path | None = None) -> dict:
    arguments = ["--device", "cpu", "--sizes", "tiny", "--rounds", "1", "--steps", "1"]
    saved = ["--output", str(output)] if output else ["--no-save"]
    return gpu.main([*arguments, *saved, "--only", *parts])


@pytest.mark.nightly
def test_trainers_and_engines_of_a_size_are_measured():
    results = found("trainers", "engines")
    assert "nothing moves" in results["not_measured"]["GB/s, bytes left"]
    assert results["machine"]["gpu"] == "none"
    size = results["tiny"]
    assert not gpu.failed(results)
    trainer, engine = size["trainers"], size["engines"]
    assert trainer["parameters"] == 1_066_368
    assert trainer["copies_gb_per_second"]["in"] > 0
    assert trainer["bytes_moved"] == 0
    assert set(trainer["suspended"]) == {"not measured"}
    assert engine["weights_bytes"] > 4 * trainer["parameters"]
    assert engine["canary_difference"] < 1e-4
    assert {"sleep level 1", "sleep level 2"} < set(engine)
    assert set(engine["arrivals_gb_per_second"]) == {"mapped", "staged"}


@pytest.mark.nightly
def test_training_sampling_and_serving_are_measured_beside_what_they_are_made_of():
    row = found("training", "plain", "sampling", "serving")["tiny"]
    assert not gpu.failed(row)
    for way in ("trainer", "compiled trainer"):
        for length in (128, 256):
            assert row["training"][way][f"{length} tokens"]["tokens_per_second"] > 0
    for way in ("plain loop", "compiled plain loop"):
        assert row["plain"][way]["128 tokens"]["tokens_per_second"] > 0
    assert row["sampling"]["of_vllm_alone"] > 0
    serving = row["serving"]
    for way in (serving["files"], serving["handoff"]):
        served, first_token = "published_to_served_seconds", "published_to_first_token_seconds"
        assert way[first_token] > way[served] > way["load_seconds"] > 0
        assert way["bytes"] > 2 * parameters_of("tiny")
    assert serving["states"] == "float32"
    assert serving["logprob_gap"]["max"] < 1e-4
    assert serving["sleep level 1"]["switch_seconds"] > 0


@pytest.mark.nightly
def test_all_weights_of_a_large_model_are_published_and_its_adapters_too(monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.sizes._LARGE_FROM", 0)
    row = found("serving", "adapters", "training")["tiny"]
    assert not gpu.failed(row)
    assert row["serving"]["states"] == "bfloat16"
    assert row["serving"]["files"]["bytes"] > 2 * parameters_of("tiny")
    adapters = row["adapters"]
    assert adapters["files"]["bytes"] < 2 * parameters_of("tiny")
    assert adapters["files"]["load_seconds"] > 0
    assert adapters["handoff"] == "the trainer kept no copy"
    assert adapters["logprob_gap"]["max"] < 1e-4
    assert row["training"]["trains"] == "adapters"
    assert "compiled trainer" in row["training"] and "trainer" not in row["training"]


@pytest.mark.nightly
def test_joint_passes_starts_recovery_and_wakes_are_measured():
    row = found("joint", "starts", "recovery", "wakes")["tiny"]
    assert not gpu.failed(row)
    assert row["joint"]["runs"] == 4
    assert 1 < row["joint"]["runs_in_a_pass"] <= 4
    assert row["joint"]["of_one_run"] > 0
    for kind in ("engine", "trainer"):
        seconds = row["starts"][kind]
        assert seconds["new_process_seconds"] > seconds["idle_process_seconds"] > 0
    assert row["recovery"]["snapshots"] > 0
    assert max(row["recovery"]["seconds_until_the_next_result"]) > 0
    assert row["wakes"]["wakes"] == 3
    assert row["wakes"]["device_bytes_left"] <= row["wakes"]["device_bytes_awake"]


@pytest.mark.nightly
def test_two_experiments_on_one_device_are_measured():
    row = found("together")["tiny"]
    assert not gpu.failed(row)
    assert row["together"]["leases"]["switches"] > 0


def test_what_fails_is_told_and_the_rest_is_measured(monkeypatch):
    def full(model, size, device):
        raise OSError("no space left")

    monkeypatch.setattr(gpu, "elsewhere", lambda bench, work, *args: full(*args))
    assert found("trainers")["tiny"] == {"trainers": {"failed": "OSError: no space left"}}


def test_goals_are_shown_beside_measurements():
    """A missing number is neither met nor missed."""
    serving = {"files": {"published_to_first_token_seconds": 1.3}}
    recovery = {"seconds_until_the_next_result": [3.0, 4.5]}
    row = {"serving": serving, "recovery": recovery, "joint": {"failed": "RuntimeError: no room"}}
    chosen = {("1.5B", part) for part in row}
    goals = {(each["part"], each["number"]): each for each in judged({"1.5B": row}, chosen)}
    assert {part for part, _ in goals} == set(row)
    by_files = goals["serving", "files, published_to_first_token_seconds"]
    assert (by_files["measured"], by_files["goal"], by_files["met"]) == (1.3, "<= 1.2", False)
    killed = goals["recovery", "seconds_until_the_next_result"]
    assert (killed["measured"], killed["met"]) == (4.5, True)
    assert goals["joint", "of_one_run"]["met"] is None
    assert goal_table(list(goals.values())).row_count == len(goals)


def test_the_parts_of_nearly_all_goals_fit_into_the_budget():
    wanted = {(goal.size, goal.part) for goal in GOALS if goal.bound} - {("1.5B", "sampling")}
    assert {(goal.size, goal.part) for goal in GOALS} <= {(e.size, e.part) for e in PLAN}
    assert {each.part for each in PLAN} == set(gpu.PARTS)
    assert sum(e.seconds for e in PLAN if (e.size, e.part) in wanted) <= gpu._BUDGET_SECONDS
    assert {(e.size, e.part) for e in PLAN[: len(wanted)]} == wanted
    assert [str(each) for each in planned(["tiny"], ["memory", "joint"])] == [
        "tiny memory",
        "tiny joint",
    ]


def test_a_part_without_time_is_left_out_and_named(monkeypatch, capsys):
    monkeypatch.setitem(gpu.PARTS, "memory", lambda *_: {"seconds": 1})
    results = found("memory", "--budget", "60")
    assert results["left_out"] == ["tiny memory"] and "tiny" not in results
    assert "left out: tiny memory takes 120 s" in capsys.readouterr().out
    assert found("memory", "--budget", "0")["tiny"] == {"memory": {"seconds": 1}}


def test_a_process_that_outlives_its_part_is_killed(tmp_path):
    device = str(Device("cpu", cores=frozenset(this_host().cores)))
    until = time.monotonic() + 1
    bench = Bench(tmp_path, device, gpu=None, rounds=1, steps=1, say=print, until=until)
    with pytest.raises(TimeoutError):
        elsewhere(bench, time.sleep, 3600)
    assert not multiprocessing.active_children()


def test_the_tests_run_after_the_measurements(monkeypatch, tmp_path):
    monkeypatch.setitem(gpu.PARTS, "memory", lambda *_: {"seconds": 1})
    results = found("memory", "--junitxml", str(tmp_path / "report.xml"))
    assert results["tests"]["status"] == (0 if accelerators() else 2)


def test_each_part_is_written_when_it_ends(monkeypatch, tmp_path):
    """The machine may be taken away midway."""

    def taken_away(*_: object) -> None:
        raise KeyboardInterrupt

    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(gpu.PARTS, "memory", broken)
    monkeypatch.setitem(gpu.PARTS, "sampling", taken_away)
    with pytest.raises(KeyboardInterrupt):
        found("memory", "publishing", "sampling", output=tmp_path / "results")
    (file,) = (tmp_path / "results").iterdir()
    row = json.loads(file.read_text())["tiny"]
    assert row["memory"] == {"failed": "RuntimeError: no such kernel"}
    publishing = row["publishing"]
    assert publishing["publish_seconds"] > 0
    assert gpu.failed({"tiny": row}) and not gpu.failed({"tiny": {"publishing": publishing}})


@pytest.mark.nightly
def test_each_way_to_train_tells_what_was_planned_for_it():
    row = found("memory")["tiny"]["memory"]
    assert not gpu.failed(row)
    assert row["checkpointed"]["planned_bytes"] < row["kept"]["planned_bytes"]
    on_host = {"moments on the host", "weights on the host"}
    assert set(row) == {"kept", "checkpointed", "LoRA", "bfloat16 states", *on_host}
    assert all("peak_allocated_bytes" not in way for way in row.values()), "there is no device"


def test_a_plan_is_compared_with_what_a_trainer_took():
    plan = trainer_pb2.MemoryPlan(device={"weights": 60, "activations": 30}, host={"snapshot": 7})
    row = compared(
        trainer_pb2.DescribeTrainerReply(
            memory=plan, peak_allocated_bytes=100, peak_reserved_bytes=120
        )
    )
    assert row["planned_bytes"] == 90
    assert row["planned_on_host"] == {"snapshot": 7}
    assert row["planned_percent_of_allocated"] == 90.0
    assert row["planned_percent_of_reserved"] == 75.0


def test_causal_attention_counts_half():
    """A sequence has T² token pairs, and T²/2 are computed: 2 products of 2 operations for each
    element of a head, and twice that backward."""
    shape, length = SIZES["tiny"], 100
    pairs = length * length / 2
    attention = 3 * 2 * 2 * pairs * shape.layers * shape.heads * shape.head_dim
    found = flops("tiny", tokens=length, length=length, adapters=False)
    assert found == 6 * length * parameters_of("tiny") + attention


def test_a_machine_without_a_gpu_says_what_it_cannot_do(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "accelerators", lambda: ())
    monkeypatch.setattr("tests.gpu.__main__.accelerators", lambda: ())
    with pytest.raises(SystemExit, match="no NVIDIA device here, and nothing was measured"):
        gpu.main([])
    assert run_gpu_tests([]) == 2
    assert "no NVIDIA device here" in capsys.readouterr().err


def test_parts_that_need_what_is_not_installed_are_named():
    assert gpu.not_measured(None, missing=["vllm"])["engines"] == "vLLM is not installed"
    assert gpu.not_measured(None, missing=["tinker"])["together"] == "not installed: tinker"
