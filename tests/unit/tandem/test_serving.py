"""Commands and manifests that serve a checkpoint without Tandem."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import InvalidField
from tandem.weights.model_store import ModelRecord
from tandem.weights.serving import (
    ServedCheckpoint,
    hub_address,
    inference_service,
    inference_service_yaml,
    vllm_commands,
    vllm_script,
)

PATH = "tinker://s-0123456789ab:train:0/sampler_weights/Final_2"
HUB = "hf://Qwen/Qwen3-0.6B:c1899de"
LORA = ServedCheckpoint(PATH, rank=20, base=HUB)
WHOLE = ServedCheckpoint(PATH)
hostile = st.text(
    st.sampled_from("""a/-'"`$(){}\\;|&<>!#*~=,: %[]é""") | st.characters(), max_size=12
)


def test_an_adapter_is_served_beside_its_base_model():
    assert vllm_script(LORA) == (
        f"tandem checkpoints export {PATH} ./Final_2\n"
        "vllm serve Qwen/Qwen3-0.6B --revision=c1899de "
        "--served-model-name=Final_2-base --enable-lora --max-lora-rank=32 "
        """--lora-modules '{"name": "Final_2", "path": "./Final_2"}' --dtype=bfloat16\n"""
    )


def test_a_whole_or_merged_model_is_served_alone():
    command = "vllm serve ./tuned --served-model-name=tuned --dtype=float32\n"
    download = f"tandem checkpoints export {PATH} ./tuned"
    whole = ServedCheckpoint(PATH, name="tuned", dtype="float32")
    assert vllm_script(whole) == f"{download}\n{command}"
    merged = ServedCheckpoint(PATH, rank=1024, merged=True, name="tuned", dtype="float32")
    assert vllm_script(merged) == f"{download} --merged\n{command}"


def test_a_manifest_for_an_adapter_reads_two_sources():
    assert inference_service_yaml(LORA, storage="s3://tuned/final", gpus=2) == (
        """\
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata:
  name: final-2
spec:
  predictor:
    storageUris:
    - uri: hf://Qwen/Qwen3-0.6B:c1899de
      mountPath: /mnt/models/base
    - uri: s3://tuned/final
      mountPath: /mnt/models/adapter
    model:
      modelFormat:
        name: huggingface
      args:
      - --backend=vllm
      - --dtype=bfloat16
      - --model_dir=/mnt/models/base
      - --served-model-name=Final_2-base
      - --enable-lora
      - --max-lora-rank=32
      - --lora-modules
      - '{"name": "Final_2", "path": "/mnt/models/adapter"}'
      resources:
        requests:
          cpu: '4'
          memory: 32Gi
          nvidia.com/gpu: '2'
        limits:
          cpu: '4'
          memory: 32Gi
          nvidia.com/gpu: '2'
"""
    )


def test_a_manifest_for_a_whole_model_reads_one_source_without_a_gpu():
    predictor = inference_service(WHOLE, storage="pvc://claim/tuned", gpus=0)["spec"]["predictor"]
    assert predictor["model"] == {
        "modelFormat": {"name": "huggingface"},
        "storageUri": "pvc://claim/tuned",
        "args": ["--backend=vllm", "--dtype=bfloat16", "--served-model-name=Final_2"],
        "resources": {amount: {"cpu": "4", "memory": "32Gi"} for amount in ("requests", "limits")},
    }
    assert "storageUris" not in predictor


def test_the_folder_of_a_claim_is_part_of_a_path_in_the_pod():
    """KServe mounts a whole claim if there are several sources."""
    served = ServedCheckpoint(PATH, rank=8, base="pvc://models/qwen/0.6b")
    predictor = inference_service(served, storage="pvc://models/tuned/")["spec"]["predictor"]
    assert [each["uri"] for each in predictor["storageUris"]] == ["pvc://models"] * 2
    assert "--model_dir=/mnt/models/base/qwen/0.6b" in predictor["model"]["args"]
    assert '"/mnt/models/adapter/tuned"' in predictor["model"]["args"][-1]


@pytest.mark.parametrize(
    ("rank", "most"), [(1, 8), (8, 8), (9, 16), (64, 64), (257, 320), (512, 512)]
)
def test_the_most_of_ranks_is_a_value_that_vllm_accepts(rank, most):
    words = vllm_commands(ServedCheckpoint(PATH, rank=rank, base="/models/tiny"))[1]
    assert f"--max-lora-rank={most}" in words


def test_a_base_model_in_a_folder_is_never_taken_for_a_repository():
    words = vllm_commands(ServedCheckpoint(PATH, rank=8, base="tiny"))[1]
    assert words[2] == "./tiny"


def test_a_downloaded_base_model_keeps_its_commit():
    record = ModelRecord(
        repository="Qwen/Qwen3-0.6B", revision="main", commit="c1899de", bytes=1, added_at=0.0
    )
    assert hub_address(record) == HUB


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"path": "tinker://s-0123456789ab:train:0/weights/final"}, "path"),
        ({"path": "tinker://s-0123456789ab:train:0/sampler_weights/a\x1b[201~"}, "path"),
        ({"path": "https://example.org/a"}, "path"),
        ({"name": "{{.Name}}"}, "name"),
        ({"name": "$(HOME)"}, "name"),
        ({"rank": 513}, "rank"),
    ],
)
def test_a_checkpoint_that_no_server_can_load_is_refused(values, field):
    with pytest.raises(InvalidField) as refused:
        ServedCheckpoint(**{"path": PATH, "base": HUB, **values})
    assert refused.value.field == field


@pytest.mark.parametrize("base", ["", "s3://bucket/base", "/models/\n", "hf://-x/y", "hf://a/$(b)"])
def test_vllm_needs_a_folder_or_a_repository(base):
    with pytest.raises(InvalidField, match="hf://ORG/NAME:REVISION or a folder"):
        vllm_commands(ServedCheckpoint(PATH, rank=8, base=base))


@pytest.mark.parametrize(
    "address",
    [
        "",
        "/models/tiny",
        "hf://tiny",
        "ftp://a/b",
        "s3://a/{{.Name}}",
        "s3://a/$(B)",
        "pvc://a/../b",
    ],
)
def test_kserve_needs_addresses_that_it_reads(address):
    with pytest.raises(InvalidField, match="storage"):
        inference_service(WHOLE, storage=address)
    with pytest.raises(InvalidField, match="base"):
        inference_service(ServedCheckpoint(PATH, rank=8, base=address), storage="s3://a/b")


@settings(max_examples=300, deadline=None)
@given(hostile, hostile)
def test_hostile_names_stay_single_words_of_a_shell(path, base):
    try:
        served = ServedCheckpoint(f"tinker://{path}/sampler_weights/a", rank=8, base=base)
        words, script = vllm_commands(served), vllm_script(served)
    except InvalidField:
        return
    assert [shlex.split(line) for line in script.splitlines()] == words
    assert all(line.isprintable() for line in script.splitlines())
    assert not words[1][2].startswith("-")


@settings(max_examples=300, deadline=None)
@given(hostile, hostile)
def test_hostile_names_and_addresses_stay_texts_of_a_manifest(name, address):
    try:
        served = ServedCheckpoint(PATH, name=name)
        manifest = inference_service(served, storage=f"s3://bucket{address}")
    except InvalidField:
        return
    assert (
        yaml.safe_load(inference_service_yaml(served, storage=f"s3://bucket{address}")) == manifest
    )
    assert re.fullmatch("[a-z]([-a-z0-9]{0,30}[a-z0-9])?", manifest["metadata"]["name"])
    assert not re.search(r"[{$]", yaml.safe_dump(manifest))  # KServe and Kubernetes expand these
