"""What is measured on a GPU runs whole on cores, but for the device."""

from __future__ import annotations

import pytest

from benchmarks.gpu import __main__ as gpu
from tests.gpu.__main__ import main as run_gpu_tests


def found(*parts: str) -> dict:
    arguments = ["--device", "cpu", "--sizes", "tiny", "--rounds", "1", "--steps", "1"]
    return gpu.main([*arguments, "--no-save", "--only", *parts])


def test_trainers_and_engines_of_a_size_are_measured():
    results = found("trainers", "engines")
    assert "nothing moves" in results["not_measured"]["GB/s, bytes left"]
    assert results["machine"]["gpu"] == "none"
    size = results["tiny"]
    assert "failed" not in size
    trainer, engine = size["trainer"], size["engine"]
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
    row = found("training", "sampling", "serving")["tiny"]
    assert "failed" not in row
    ways = {"trainer", "plain loop", "compiled plain loop"}
    assert all(row["training"][way]["tokens_per_second"] > 0 for way in ways)
    assert row["sampling"]["of_vllm_alone"] > 0
    serving = row["serving"]
    assert serving["published_to_served_seconds"] >= serving["load_seconds"] > 0
    assert serving["delta_to_served_seconds"] > 0
    assert serving["handoff"]["published_to_served_seconds"] > 0
    assert serving["logprob_gap"]["max"] < 1e-4


@pytest.mark.nightly
def test_two_experiments_on_one_device_are_measured():
    row = found("together")["tiny"]
    assert "failed" not in row
    assert row["together"]["leases"]["switches"] > 0


def test_what_fails_is_told_and_the_rest_is_measured(monkeypatch):
    def full(model, size, device):
        raise OSError("no space left")

    monkeypatch.setattr(gpu, "elsewhere", lambda bench, work, *args: full(*args))
    assert found("trainers")["tiny"] == {"failed": "OSError: no space left"}


def test_a_machine_without_a_gpu_says_what_it_cannot_do(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "accelerators", lambda: ())
    monkeypatch.setattr("tests.gpu.__main__.accelerators", lambda: ())
    with pytest.raises(SystemExit, match="no NVIDIA device here, and nothing was measured"):
        gpu.main([])
    assert run_gpu_tests() == 2
    assert "no NVIDIA device here" in capsys.readouterr().err


def test_parts_that_need_what_is_not_installed_are_named():
    assert gpu.not_measured(None, missing=["vllm"])["engines"] == "vLLM is not installed"
    assert gpu.not_measured(None, missing=["tinker"])["together"] == "not installed: tinker"
