"""A sabotaged engine does not pass with a version that it did not load.

The versions differ by one bit in each bfloat16 tensor, so a canary passes all."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sampler_service.vllm.environment import _intel_openmp, is_cpu_build, sampler_environment
from tests.support.adapter_files import EVERYTHING, write_adapter_files
from tests.support.architectures import write_model
from tests.support.sampler_worker import LENGTH, publish
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

_TRY = """
import json, sys
from functools import partial
from pathlib import Path

from sampler_service.engine import WeightsTouched
from sampler_service.service.engine_process import EngineProcess
from sampler_service.vllm.start import start_engine
from sampler_service.weights.loader import LoadableVersion, Loader, default_tolerance
from tandem.settings.workers import SamplerSettings

model, old, new = map(Path, sys.argv[1:4])
rank, engine_process, threads = int(sys.argv[4]), sys.argv[5], int(sys.argv[6])
settings = {"device": "cpu", "dtype": "bfloat16", "kv_cache_bytes": 2**24, "max_lora_rank": rank}
order = model.parent / "sabotage"

def start(on_lost):
    engine = start_engine(model, SamplerSettings(**settings), on_lost, sleeps=False)
    import torch
    from sampler_service.vllm import worker_extension

    from vllm.lora.layers.base import BaseLayerWithLoRA

    del BaseLayerWithLoRA.load_weights  # as in vLLM 0.26
    memory = partial(torch.empty, dtype=torch.uint8)
    worker_extension.staged = partial(worker_extension.staged, allocate=memory, ahead=2**16)
    worker_extension.staging_threads = lambda device, workers: threads

    extension, read = worker_extension.WeightsExtension, worker_extension.read_tensors
    load = extension.tandem_load

    def mixed(stale):
        before = dict(read(old))
        return lambda *where: (
            (name, before[name] if stale in name else tensor) for name, tensor in read(*where)
        )

    def tandem_load(worker, directory):
        worker_extension.read_tensors = read
        sabotage = order.read_text()
        if sabotage == "ignored":
            return set()
        if sabotage == "version before":
            return load(worker, str(old))
        if sabotage:
            worker_extension.read_tensors = mixed(sabotage)
        return load(worker, directory)

    extension.tandem_load = tandem_load
    return engine

if engine_process == "on":
    engine = EngineProcess.fork(start, model=model, patience=120).connect(lambda: None)
else:
    engine = start(lambda: None)
loader = Loader(engine, base=model, tolerance=default_tolerance("bfloat16"))

def attempt(path, *, sabotage=""):
    order.write_text(sabotage)
    name = f"base/{path.name}"
    if path != model:
        name = json.loads((path / "manifest.json").read_text())["version"]
    verified = loader.verify(LoadableVersion(name=name, path=path), lambda: None)
    try:
        loader.place(verified)
        return loader.confirm(verified)
    except WeightsTouched as error:
        return error.message

results = {path.name: attempt(path) for path in (model, old, new)}
results["base again"] = attempt(model)
for sabotage in sys.argv[7:]:
    results["before " + sabotage] = attempt(old)
    results[sabotage] = attempt(new, sabotage=sabotage)
    if sabotage == "ignored":
        loader._compare_sums = lambda verified: None
        results["ignored, by the canary alone"] = attempt(new, sabotage=sabotage)
        del loader._compare_sums
print("RESULTS", json.dumps(results))
"""


def nudged(source: Path, target: Path, *, at: float = 0.3) -> Path:
    """A bfloat16 copy. At the share `at` of each tensor, one number's last bit is changed."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
        for tensor in tensors.values():
            tensor.view(torch.int16).view(-1)[int(tensor.numel() * at)] ^= 1
        save_file(tensors, file)
    return target


@pytest.mark.parametrize(
    ("architecture", "rank", "engine_process", "staging_threads", "sabotages"),
    [
        (
            "qwen3",
            0,
            "off",
            0,
            ["ignored", "version before", "embed_tokens", "1.self_attn.v_proj", "2.mlp.down"],
        ),
        pytest.param(
            *("qwen3_moe", 0, "off", 2, ["ignored", "2.mlp.experts"]), marks=pytest.mark.nightly
        ),
        pytest.param(
            *("llama", 4, "on", 2, ["ignored", "lm_head", "0.input_layernorm"]),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_load_that_did_not_happen_is_refused(
    tmp_path: Path,
    architecture: str,
    rank: int,
    engine_process: str,
    staging_threads: int,
    sabotages: list[str],
):
    model = write_tiny_model(
        tmp_path / "base", architecture=architecture, head_dim=32, max_length=LENGTH
    )
    folders = [nudged(model, tmp_path / "old")]
    folders.append(nudged(folders[0], tmp_path / "new", at=0.5))
    old, new = (Path(publish(each, tmp_path, number=n).path) for n, each in enumerate(folders))
    arguments = (model, old, new, rank, engine_process, staging_threads)
    done = subprocess.run(
        [sys.executable, "-c", _TRY, *map(str, arguments), *sabotages],
        env=sampler_environment(os.environ, cpu=is_cpu_build(), library=_intel_openmp()),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.partition("RESULTS ")[2])
    assert math.isnan(results.pop("base")) and math.isnan(results.pop("base again"))
    for name in (old.name, new.name, *(f"before {sabotage}" for sabotage in sabotages)):
        assert results.pop(name) < 0.1
    assert results.pop("ignored, by the canary alone") < 0.1, "it tells nothing"
    assert set(results) == set(sabotages)
    for refusal in results.values():
        assert "does not hold these weights" in refusal


_TRY_TWO = """
import json, os, sys
from dataclasses import replace
from pathlib import Path

from sampler_service.engine import WeightsTouched
from sampler_service.vllm.libraries import import_libraries
from sampler_service.weights.loader import LoadableVersion, Loader, default_tolerance
from tandem.errors import LoadFailed
from tandem.settings.workers import SamplerSettings

def main():
    import_libraries()
    from sampler_service.vllm import engine as vllm_engine

    made = vllm_engine.engine_args
    extension = "tests.support.forgetful_worker.ForgetfulExtension"
    vllm_engine.engine_args = lambda *args, **kwargs: replace(
        made(*args, **kwargs), worker_extension_cls=extension
    )
    model, old, new = map(Path, sys.argv[1:4])
    settings = {"device": "cpu", "dtype": "bfloat16", "kv_cache_bytes": 2**24, "ranks": 2}
    settings["max_lora_rank"] = 4 * len(sys.argv[4:])
    engine = vllm_engine.VllmEngine(model, SamplerSettings(**settings))
    loader = Loader(engine, base=model, tolerance=default_tolerance("bfloat16"))

    def load(path):
        name = json.loads((path / "manifest.json").read_text())["version"]
        verified = loader.verify(LoadableVersion(name=name, path=path), lambda: None)
        try:
            loader.place(verified)
            loader.confirm(verified)
        except WeightsTouched as error:
            return error.message
        return ""

    def add(path):
        try:
            engine.add_adapter("adapter", path)
            engine.remove_adapter("adapter")
        except LoadFailed as error:
            return error.message
        return ""

    def attempt():
        return [load(new), *map(add, map(Path, sys.argv[4:]))]

    results = [load(old), attempt()]
    load(old)
    Path(os.environ["FORGETFUL"]).touch()
    results.append(attempt())
    Path(os.environ["FORGETFUL"]).unlink()
    results.append(attempt())
    print("RESULTS", json.dumps(results))

if __name__ == "__main__":
    main()
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("architecture", "heads"), [("qwen3", 1), ("qwen3_moe", 2)])
def test_a_worker_of_two_that_did_not_load_is_noticed(
    tmp_path: Path, architecture: str, heads: int
):
    """Each worker has a part of most tensors and all of some (keys with one head)."""
    model = write_model(tmp_path / "base", architecture, num_key_value_heads=heads)
    adapters = []
    if architecture == "qwen3":
        adapters.append(
            write_adapter_files(tmp_path / "4", model, seed=1, rank=4, modules=EVERYTHING)
        )
    folders = [nudged(model, tmp_path / "old")]
    folders.append(nudged(folders[0], tmp_path / "new", at=0.7))
    old, new = (Path(publish(each, tmp_path, number=n).path) for n, each in enumerate(folders))
    script = tmp_path / "two.py"  # vLLM's processes import it again
    script.write_text(_TRY_TWO)
    environment = sampler_environment(os.environ, cpu=is_cpu_build(), library=_intel_openmp())
    done = subprocess.run(
        [sys.executable, str(script), *map(str, (model, old, new, *adapters))],
        env={**environment, "FORGETFUL": str(tmp_path / "forget"), "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, loaded, forgotten, again = json.loads(done.stdout.partition("RESULTS ")[2])
    assert [first, *loaded, *again] == [""] * (3 + 2 * len(adapters))
    assert "does not hold these weights" in forgotten[0]
    assert all("does not hold this adapter" in refusal for refusal in forgotten[1:])
    assert '"event":"weights_staged"' in done.stderr, "in the form of a worker's log"
    assert "weights_compared_by_canary_alone" not in done.stderr + done.stdout
