"""tinker-cookbook's tools with a trainer's published adapters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tandem.protocol.worker import LoraSpec
from tests.support.cookbook import ROOT
from tests.support.local_trainer import (
    data_of,
    logprobs,
    logprobs_of_model,
    make,
    plain,
    publish,
    train,
)

pytestmark = pytest.mark.slow

MERGE = """
import sys
from tinker_cookbook import weights
base, adapter, out = sys.argv[1:]
weights.build_lora_adapter(base_model=base, adapter_path=adapter, output_path=out + "-peft")
weights.build_hf_model(base_model=base, adapter_path=adapter, output_path=out, dtype="float32")
"""


def merge(base: Path, adapter: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return cookbook("-c", MERGE, base, adapter, out)


def merge_by_script(base: Path, adapter: Path, out: Path) -> subprocess.CompletedProcess[str]:
    script = ("-m", "tinker_cookbook.scripts.merge_tinker_adapter_to_hf_model")
    named = ("--hf-model", base, "--tinker-adapter-path", adapter, "--output-path", out)
    return cookbook(*script, *named)


def cookbook(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    subprocess.run([ROOT / "scripts" / "cookbook.sh"], check=True)  # installs it
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / '.venv' / 'cookbook'}:{ROOT}"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("model", "head", "merges"),
    [
        pytest.param("llama", True, True, marks=pytest.mark.nightly),
        ("qwen3", False, True),
        ("qwen3", True, False),
    ],
)
def test_the_cookbook_merges_an_adapter_unless_it_changes_a_tied_head(
    models, tmp_path, model, head, merges
):
    trainer = make(models[model], LoraSpec(rank=4, seed=1, unembedding=head))
    train(trainer, 3)
    publish(trainer, tmp_path / "v1")

    done = merge(models[model], tmp_path / "v1", tmp_path / "merged")

    assert (done.returncode == 0) is merges, done.stderr[-2000:]
    assert (tmp_path / "merged-peft" / "adapter_model.safetensors").is_file()
    scripted = merge_by_script(models[model], tmp_path / "v1", tmp_path / "scripted")
    assert (scripted.returncode == 0) is merges, scripted.stderr[-2000:]
    card = (tmp_path / "v1" / "README.md").read_text()
    if not merges:  # a merge into the shared weight would change the embeddings, too
        for each in (done, scripted):
            assert "which does not exist in the model state dict" in each.stderr
        assert "does not exist in the model state dict" in card
        assert "`tandem checkpoints export --merged`" in card
        return
    assert "does not exist in the model state dict" not in card
    for name in ("merged", "scripted"):
        found = logprobs_of_model(plain(tmp_path / name), data_of(4))
        np.testing.assert_allclose(found, logprobs(trainer, data_of(4)), atol=1e-4)
