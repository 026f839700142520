"""Which of vLLM's model runners an engine is to have."""

from __future__ import annotations

import os

import pytest

from sampler_service.vllm import environment
from tandem.worker_settings import SamplerSettings

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
