"""`tandem up` and `tandem demo` on a simulated H200, without workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_nvml import pynvml

pytestmark = pytest.mark.slow

TANDEM = str(Path(sys.executable).parent / "tandem")
BOTH = ["trainer", "sampler"]


def sentence(*command: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name[:7] != "TANDEM_"}
    done = subprocess.run(
        [TANDEM, *command], env=environment | variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.fixture
def gpu(monkeypatch) -> None:
    pynvml.install(monkeypatch, "GPU-8f6a-11")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_up_says_in_a_line_what_it_found(gpu, tmp_path):
    command = [TANDEM, "up", "--port", "0", "--data-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        assert "Tandem is up at" in up.stdout.readline()
        assert up.stdout.readline() == "found one NVIDIA H200 (140 GiB): trainers run 1 rank\n"
        up.terminate()
        up.communicate(timeout=120)


@pytest.mark.parametrize(
    "variables",
    [
        {"TANDEM_TRAINER_RANKS": "4"},
        {"TANDEM_TRAINER_RANKS": "4", "TANDEM_SAMPLER_DEVICE": "cpu"},
        {
            "TANDEM_TRAINER_RANKS": "4",
            "TANDEM_GROUPS": json.dumps([{"name": "g", "devices": ["cuda:0"], "roles": BOTH}]),
        },
        {
            "TANDEM_TRAINER_RANKS": "4",
            "TANDEM_GROUPS": json.dumps([{"name": "g", "devices": ["cuda:GPU-8f"], "roles": BOTH}]),
        },
    ],
)
def test_more_ranks_than_devices_are_refused_at_the_start_with_both_numbers(
    gpu, tmp_path, variables
):
    said = sentence("up", "--port", "0", "--data-dir", str(tmp_path), **variables)
    assert "a trainer with 4 ranks (TANDEM_TRAINER_RANKS" in said
    assert "(1 device)" in said


def test_a_demo_that_asks_for_more_ranks_than_devices_is_refused_before_it_trains(gpu, tmp_path):
    where = ("--data-dir", str(tmp_path / "data"), "--out", str(tmp_path / "out"))
    said = sentence("demo", "--ranks", "4", *where)
    assert "a trainer with 4 ranks (TANDEM_TRAINER_RANKS, or --ranks of the demo)" in said
    assert "gpu (1 device)" in said


@pytest.mark.parametrize("command", [("up", "--port", "0"), ("demo",), ("doctor",)])
def test_a_mig_instance_is_refused_by_name(gpu, tmp_path, command):
    where = ("--data-dir", str(tmp_path))
    said = sentence(*command, *where, CUDA_VISIBLE_DEVICES="MIG-8f6a-11")
    assert "CUDA_VISIBLE_DEVICES names the MIG instance MIG-8f6a-11" in said
    assert "turn MIG off" in said


def test_a_mig_instance_in_a_group_is_refused_by_name(gpu, tmp_path):
    groups = json.dumps([{"name": "g", "devices": ["cuda:MIG-8f6a"], "roles": BOTH}])
    said = sentence("up", "--port", "0", "--data-dir", str(tmp_path), TANDEM_GROUPS=groups)
    assert "TANDEM_GROUPS: group 'g': cuda:MIG-8f6a is a MIG instance" in said


def test_a_device_that_is_divided_is_refused_by_name(monkeypatch, tmp_path):
    pynvml.install(monkeypatch, "GPU-8f6a-11/MIG")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    said = sentence("up", "--port", "0", "--data-dir", str(tmp_path))
    assert "cuda:0 (GPU-8f6a-11), NVIDIA H200, is divided into MIG instances" in said
