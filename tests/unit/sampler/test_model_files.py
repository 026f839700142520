from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sampler_service.vllm.environment import sampler_environment
from sampler_service.weights.loader import check_inventory, is_tied, loadable, read_inventory
from tandem.errors import LoadFailed
from tandem.weights.model_config import model_length


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def test_nested_configs_are_read_as_the_language_models(tmp_path: Path):
    write_json(
        tmp_path / "config.json",
        {"text_config": {"max_position_embeddings": 99, "tie_word_embeddings": True}},
    )
    assert model_length(tmp_path) == 99
    assert is_tied(tmp_path)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "1.safetensors")
    save_file({"b": np.zeros(4, np.float32)}, tmp_path / "2.safetensors")
    return tmp_path


def test_an_inventory_is_read_over_all_files(weights: Path):
    inventory = read_inventory(weights)
    assert {name: entry.shape for name, entry in inventory.items()} == {"a": (2, 3), "b": (4,)}


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"a": np.zeros((2, 3), np.float32)}, "lacks b"),
        ({"a": np.zeros((3, 2), np.float32), "b": np.zeros(4, np.float32)}, "shape"),
        ({"a": np.zeros((2, 3), np.int32), "b": np.zeros(4, np.float32)}, "I32"),
        (
            {k: np.zeros(s, np.float32) for k, s in {"a": (2, 3), "b": 4, "c": 1}.items()},
            "has c too many",
        ),
    ],
)
def test_a_version_with_other_tensors_is_refused(weights: Path, tmp_path: Path, tensors, reason):
    other = tmp_path / "other"
    other.mkdir()
    save_file(tensors, other / "1.safetensors")
    with pytest.raises(LoadFailed, match=reason):
        check_inventory(read_inventory(other), expected=read_inventory(weights), name="v")


def test_another_floating_dtype_is_fine(weights: Path, tmp_path: Path):
    other = tmp_path / "half"
    other.mkdir()
    save_file(
        {"a": np.zeros((2, 3), np.float16), "b": np.zeros(4, np.float16)}, other / "x.safetensors"
    )
    check_inventory(read_inventory(other), expected=read_inventory(weights), name="v")


def test_a_tied_head_counts_neither_here_nor_there(tmp_path: Path):
    save_file(
        {"lm_head.weight": np.zeros(1, np.float32), "a": np.zeros(1, np.float32)},
        tmp_path / "1.safetensors",
    )
    assert set(loadable(read_inventory(tmp_path), tied=True)) == {"a"}
    assert set(loadable(read_inventory(tmp_path), tied=False)) == {"a", "lm_head.weight"}


def test_a_file_that_is_cut_short_is_refused(weights: Path):
    file = weights / "1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        LoadFailed, match=r"1\.safetensors is not a safetensors file: .* the file at byte"
    ):
        read_inventory(weights)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]"])
def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "1.safetensors").write_bytes(content)
    with pytest.raises(LoadFailed):
        read_inventory(tmp_path)


def test_the_cpu_build_gets_one_thread_and_intels_openmp_first():
    environment = sampler_environment(
        {"LD_PRELOAD": "other.so", "OMP_NUM_THREADS": "8"}, cpu=True, library=Path("lib/iomp.so")
    )
    assert environment["LD_PRELOAD"] == "lib/iomp.so:other.so"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_the_cuda_build_keeps_its_compiler_and_threads():
    environment = sampler_environment({"OMP_NUM_THREADS": "8"}, cpu=False, library=None)
    assert "TORCHDYNAMO_DISABLE" not in environment
    assert environment["OMP_NUM_THREADS"] == "8"
    assert environment["HF_HUB_OFFLINE"] == "1"
