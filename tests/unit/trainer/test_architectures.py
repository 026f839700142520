"""Every architecture of the table: trained, exported, and read by transformers and peft."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from peft import PeftModel

from tests.support.architectures import CONFIGURATIONS, WINDOW, lora_of, write_model
from tests.support.local_trainer import (
    forward_backward,
    logprobs,
    logprobs_of_model,
    make,
    publish,
    step,
)
from tests.support.plain_model import load
from tests.support.tiny_model import VOCABULARY
from tests.support.trainer_worker import datum
from trainer_service.lora.merge import merge

LENGTHS = (30, 30, 21, 9, 9, 4, 1)
PADDED = frozenset(["falcon", "gemma2", "gpt_oss", "stablelm"])
"""Architectures that cannot be packed: capped attention logits, sinks, or an attention of their
own."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("architectures")
    return {name: write_model(root / name, name) for name in CONFIGURATIONS}


def data(seed: int = 0):
    rng = np.random.default_rng(seed)
    return [
        datum(rng.integers(0, VOCABULARY, n).tolist(), weights=rng.uniform(0, 1, n))
        for n in LENGTHS
    ]


def assert_same(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("packing", ["on", "off"])
@pytest.mark.parametrize("architecture", CONFIGURATIONS)
def test_logprobs_depend_on_nothing_else_in_a_micro_batch(paths, architecture, packing):
    """Sequences are longer than a window. Transformers computes each one alone."""
    assert max(LENGTHS) > 2 * WINDOW
    trainer = make(paths[architecture], None, packing=packing)
    assert trainer.trainer.backend.packs == (packing == "on" and architecture not in PADDED)

    together = logprobs(trainer, data())

    alone = [logprobs(trainer, [one]) for one in data()]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=0, atol=1e-5)
    assert_same(together, logprobs_of_model(load(paths[architecture]), data()))


@pytest.mark.parametrize("architecture", CONFIGURATIONS)
def test_a_version_is_what_transformers_computes(paths, tmp_path, architecture):
    trainer = make(paths[architecture], None)
    before = logprobs(trainer, data())
    forward_backward(trainer, data(1))
    step(trainer)
    expected = logprobs(trainer, data())
    publish(trainer, tmp_path / "v1")

    assert np.abs(expected - before).max() > 0.01
    assert_same(logprobs_of_model(load(tmp_path / "v1"), data()), expected)


@pytest.mark.parametrize("architecture", CONFIGURATIONS)
def test_an_adapter_is_what_peft_computes_and_the_merged_model_transformers(
    paths, tmp_path, architecture
):
    trainer = make(paths[architecture], lora_of(architecture))
    before = logprobs(trainer, data())
    for seed in (1, 2):  # B is zero before the first step
        forward_backward(trainer, data(seed))
        step(trainer)
    expected = logprobs(trainer, data())
    publish(trainer, tmp_path / "v1")
    merge(tmp_path / "v1", paths[architecture], tmp_path / "merged")

    assert np.abs(expected - before).max() > 0.01
    adapted = PeftModel.from_pretrained(load(paths[architecture]), tmp_path / "v1").eval()
    assert_same(logprobs_of_model(adapted, data()), expected)
    assert_same(logprobs_of_model(load(tmp_path / "merged"), data()), expected)
