"""KServe's own package reads our manifests, and a shell our commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tandem.weights.serving import (
    Manifest,
    ServedCheckpoint,
    inference_service,
    inference_service_yaml,
    vllm_commands,
    vllm_script,
)

PACKAGES = Path(sys.prefix) / "kserve"
PATH = "tinker://s-0123456789ab:train:0/sampler_weights/final"
SCRIPT = """
import json, sys, types, yaml
import kserve, kserve.models, kubernetes.client.models as models

for name in dir(models):  # kserve.models has no classes of Kubernetes
    if name.startswith("V1"):
        setattr(kserve.models, name, getattr(models, name))
client, read = kserve.ApiClient(), []
for each in yaml.safe_load_all(sys.stdin):
    response = types.SimpleNamespace(data=json.dumps(each))
    model = client.deserialize(response, "V1beta1InferenceService")
    read.append(client.sanitize_for_serialization(model))
print(json.dumps(read))
"""

needs_kserve = pytest.mark.skipif(
    not PACKAGES.is_dir(), reason="kserve is not installed: scripts/kserve.sh"
)


def read_by_kserve(text: str) -> list[Manifest]:
    """Return the manifests in KServe's models. Unknown fields are missing."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PYTHONPATH": str(PACKAGES), "PATH": "/usr/bin:/bin"},
        input=text,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Manifest] = json.loads(done.stdout)
    for each in found:
        assert each["spec"]["predictor"]["model"].pop("name") == ""  # the default of the class
    return found


@needs_kserve
@pytest.mark.nightly
def test_kserves_models_return_every_field_unchanged():
    lora = ServedCheckpoint(PATH, rank=20, base="hf://Qwen/Qwen3-0.6B:c1899de")
    asks = [
        (lora, "s3://tuned/final", 2),
        (lora, "pvc://tuned/final", 1),
        (ServedCheckpoint(PATH), "gs://tuned/final", 0),
        (ServedCheckpoint(PATH, rank=20, merged=True), "pvc://tuned", 1),
    ]
    texts = [inference_service_yaml(served, storage=at, gpus=n) for served, at, n in asks]
    manifests = [inference_service(served, storage=at, gpus=n) for served, at, n in asks]
    assert read_by_kserve("---\n".join(texts)) == manifests
    odd = yaml.safe_dump(manifests[0] | {"spec": manifests[0]["spec"] | {"storageUri": "s3://a/b"}})
    assert read_by_kserve(odd) == manifests[:1]


def test_a_shell_runs_nothing_that_a_name_holds(tmp_path):
    evil = "$(touch ran) `touch ran`; touch ran & '\" |"
    served = ServedCheckpoint(f"tinker://{evil}/sampler_weights/a", rank=8, base=f"/m/{evil}")
    shell = 'tandem() { printf "%s\\n" "$@"; }; vllm() { printf "%s\\n" "$@"; }\n'
    done = subprocess.run(
        ["sh", "-c", shell + vllm_script(served)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        word for words in vllm_commands(served) for word in words[1:]
    ]
    assert list(tmp_path.iterdir()) == []
