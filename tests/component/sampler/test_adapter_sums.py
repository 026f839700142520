"""A sabotaged engine does not pass with an adapter that it did not take in.

The adapters change less than a canary in bfloat16 notices. The engine omits a layer's copy into the
slot, reads other numbers, or cannot read the files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sampler_service.vllm.environment import _intel_openmp, is_cpu_build, sampler_environment
from tests.support.adapter_files import EVERYTHING, write_adapter_files
from tests.support.sampler_worker import LENGTH
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

_TRY = """
import json, sys
from pathlib import Path

from sampler_service.vllm.libraries import import_libraries

import_libraries()

from vllm.lora.layers import MergedColumnParallelLinearWithLoRA
from vllm.lora.lora_weights import LoRALayerWeights
from sampler_service.vllm.engine import VllmEngine
from tandem.errors import LoadFailed
from tandem.settings.workers import SamplerSettings

settings = {"device": "cpu", "dtype": "bfloat16", "kv_cache_bytes": 2**24, "max_lora_rank": 8}
engine = VllmEngine(Path(sys.argv[1]), SamplerSettings(**settings))
results = []

def attempt(directory):
    name = f"run/v{len(results)}"
    try:
        engine.add_adapter(name, Path(directory))
        engine.remove_adapter(name)
        results.append("")
    except LoadFailed as error:
        results.append(error.message)

for directory in sys.argv[2:]:
    attempt(directory)
kind = MergedColumnParallelLinearWithLoRA
copy, kind.set_lora = kind.set_lora, lambda self, index, a, b: self.reset_lora(index)
attempt(directory)
kind.set_lora = copy
attempt(directory)
scaled = LoRALayerWeights.optimize
def one_bit_off(self):
    import torch
    scaled(self).lora_a.view(torch.int16)[0, 0] ^= 1
    return self
LoRALayerWeights.optimize = one_bit_off
attempt(directory)
LoRALayerWeights.optimize = scaled
attempt(directory)
from sampler_service.vllm import adapter_sums
opened = adapter_sums.safe_open
def unreadable(*_args, **_more):
    raise OSError("Input/output error")
adapter_sums.safe_open = unreadable
attempt(directory)
adapter_sums.safe_open = opened
assert not engine._engine.list_loras(), "what was refused is still there"
attempt(directory)
print("RESULTS", json.dumps(results))
"""


def test_an_adapter_that_the_engine_did_not_take_in_is_refused(tmp_path: Path):
    model = write_tiny_model(tmp_path / "base", head_dim=32, max_length=LENGTH)
    adapters = [
        write_adapter_files(tmp_path / f"{rank}", model, seed=1, rank=rank, modules=modules)
        for rank, modules in [
            (8, EVERYTHING),
            (5, EVERYTHING),
            (4, ("q_proj", "v_proj", "up_proj")),
        ]
    ]
    done = subprocess.run(
        [sys.executable, "-c", _TRY, str(model), *map(str, adapters)],
        env=sampler_environment(os.environ, cpu=is_cpu_build(), library=_intel_openmp()),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *whole, not_copied, again, one_bit_off, once_more, unreadable, at_last = json.loads(
        done.stdout.partition("RESULTS ")[2]
    )
    assert [*whole, again, once_more, at_last] == [""] * 6
    assert unreadable.endswith("cannot be compared with its files: Input/output error")
    for refusal in (not_copied, one_bit_off):
        assert "does not hold this adapter" in refusal
