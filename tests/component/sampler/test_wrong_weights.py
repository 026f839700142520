"""Whatever is wrong with new weights is noticed before the first token.

Each kind of fault meets a real engine, which serves the old weights afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from sampler_service.vllm.environment import _intel_openmp, is_cpu_build, sampler_environment

NOTICED = {
    "stale_file": "damaged (wrong checksum)",
    "swapped_shard": "does not hold these weights",
    "half_a_version": "lacks model-00001-of-00002.safetensors",
    "another_version": "holds ",
    "wrong_base": "has the shape",
    "wrong_type": "does not hold these weights",
    "permuted_tensor": "the engine's logprobs differ",
    "other_adapter": "the engine's logprobs differ",
    "adapter_of_another_base": "the engine's logprobs differ",
    "old_cache": "did not empty its prefix cache",
    "wake_without_load": "does not hold these weights",
    "ignored_load": "does not hold these weights",
    "old_tied_head": "other numbers in the rest",
    "interrupted_load": "the volume is gone",
}
"""The refusal's words by fault."""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """The results of `tests/support/wrong_weights.py` by fault."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.wrong_weights", tmp_path_factory.mktemp("wrong")],
        env=sampler_environment(os.environ, cpu=is_cpu_build(), library=_intel_openmp()),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, dict[str, object]] = json.loads(done.stdout.partition("RESULTS ")[2])
    return results


@pytest.mark.parametrize("fault", NOTICED)
def test_wrong_weights_are_refused_and_the_old_ones_serve(
    refusals: dict[str, dict[str, object]], fault: str
):
    refusal = refusals[fault]
    assert str(refusal["error"]).startswith("load_failed: ")
    assert NOTICED[fault] in str(refusal["error"])
    assert (refusal["serves"], refusal["right"]) == ("old", True)


@pytest.mark.parametrize(
    ("fault", "report"),
    [
        ("torn_handoff", "does not hold these weights, but other numbers in the rest (repaired)"),
        ("moved_parameters", " (repaired)"),
    ],
)
def test_a_load_goes_another_way_where_the_first_is_wrong(
    refusals: dict[str, dict[str, object]], fault: str, report: str
):
    refusal = refusals[fault]
    assert str(refusal["error"]).endswith(report)
    assert (refusal["serves"], refusal["right"]) == ("new", True)


def test_an_engine_that_loads_nothing_right_serves_nothing(
    refusals: dict[str, dict[str, object]],
):
    refusal = refusals["exchanged_places"]
    assert "the engine's logprobs differ" in str(refusal["error"])
    assert "could not be loaded again" in str(refusal["error"])
    assert refusal["serves"] == "nothing"


def test_every_kind_is_tried(refusals: dict[str, dict[str, object]]):
    others = {"torn_handoff", "moved_parameters", "exchanged_places"}
    assert set(refusals) == {*NOTICED, *others}
