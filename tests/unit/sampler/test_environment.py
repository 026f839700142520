from __future__ import annotations

import os

import pytest

from sampler_service.vllm import environment
from tandem.settings.workers import SamplerSettings

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


@pytest.mark.parametrize(
    ("wanted", "cpu", "chosen"),
    [
        ("auto", True, "0"),
        ("auto", False, None),
        ("v1", False, "0"),
        ("v2", False, "1"),
        ("v2", True, "1"),
    ],
)
def test_it_is_left_to_vllm_on_a_gpu_unless_the_settings_say_it(monkeypatch, wanted, cpu, chosen):
    monkeypatch.setenv(VARIABLE, "unset below, and as before after the test")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(environment, "is_cpu_build", lambda: cpu)
    environment.choose_model_runner(SamplerSettings(model_runner=wanted))
    assert os.environ.get(VARIABLE) == chosen


@pytest.mark.parametrize(
    ("given", "allocator"),
    [
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": environment._ALLOCATOR}),
        ({"PYTORCH_ALLOC_CONF": "a:1"}, {"PYTORCH_ALLOC_CONF": "a:1"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "b:2"}, {"PYTORCH_CUDA_ALLOC_CONF": "b:2"}),
    ],
)
def test_a_gpus_engine_needs_no_flashinfer_and_pins_in_threads(given, allocator):
    found = environment.sampler_environment(given, cpu=False, library=None)
    assert found["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert {name: found[name] for name in found if "ALLOC_CONF" in name} == allocator
    assert "OMP_NUM_THREADS" not in found


def test_a_cpus_engine_is_told_nothing_of_gpus():
    found = environment.sampler_environment({"VLLM_CACHE_ROOT": "/x"}, cpu=True, library=None)
    assert found["VLLM_CACHE_ROOT"] == "/x"
    assert not [name for name in found if "FLASHINFER" in name or "ALLOC_CONF" in name]
