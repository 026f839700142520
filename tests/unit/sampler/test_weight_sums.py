"""Checksums prove that an engine holds the numbers of a version's files, in any layout."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sampler_service.engine import EngineFacts, WeightsTouched
from sampler_service.weights.files import read_tensors
from sampler_service.weights.loader import LoadableVersion, Loader
from tandem.errors import LoadFailed
from tandem.v1 import common_pb2
from tandem.weights import Manifest, checksum_file
from tandem.weights.sums import (
    TensorSums,
    block_of,
    differing,
    file_sums,
    sum_of,
    sums_of,
    sums_of_workers,
)

BFLOAT16 = torch.bfloat16


def some(*shape: int, seed: int = 0, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32])
@pytest.mark.parametrize("columns", [5, 8, 64])
def test_the_order_of_rows_and_padding_do_not_count(dtype: torch.dtype, columns: int):
    q, k = some(6, columns, dtype=dtype), some(2, columns, seed=1, dtype=dtype)
    fused = torch.cat([k, q, torch.zeros(3, columns, dtype=dtype)])
    whole = (sum_of(q, dtype) + sum_of(k, dtype)) % 2**64
    assert whole == sum_of(fused, dtype) == sum_of(fused.reshape(1, -1, columns), dtype)


@pytest.mark.parametrize("shape", [(4, 8), (4, 5), (32,)])
def test_every_bit_of_every_number_counts(shape: tuple[int, ...]):
    tensor = some(*shape)
    before = sum_of(tensor, BFLOAT16)
    bits = tensor.view(torch.int16).view(-1)
    for position in range(tensor.numel()):
        for bit in range(16):
            mask = 1 << bit if bit < 15 else -(1 << 15)
            bits[position] ^= mask
            assert sum_of(tensor, BFLOAT16) != before
            bits[position] ^= mask


def test_opposite_changes_do_not_cancel_out():
    tensor = some(4, 8)
    before = sum_of(tensor, BFLOAT16)
    for one in range(32):
        for other in range(32):
            changed = tensor.clone()
            bits = changed.view(torch.int16).view(-1)
            bits[one] += 1
            bits[other] -= 1
            assert (sum_of(changed, BFLOAT16) != before) == (one != other)


def test_a_large_tensor_is_added_up_piece_by_piece():
    tensor, pieces = some(150, 1024), []
    whole = sum_of(tensor, BFLOAT16, lambda: pieces.append(1))
    assert len(pieces) == 3
    assert whole == (sum_of(tensor[:7], BFLOAT16) + sum_of(tensor[7:], BFLOAT16)) % 2**64


def test_files_are_added_up_in_the_engines_type_by_block(tmp_path: Path):
    tensors = {"model.layers.3.q.weight": some(4, 8), "lm_head.weight": some(4, 8, seed=1)}
    save_file(
        {name: tensor.float() for name, tensor in tensors.items()}, tmp_path / "a.safetensors"
    )
    save_file({"left.out": some(3)}, tmp_path / "b.safetensors")
    sums = file_sums(read_tensors(tmp_path), tensors, dtype="bfloat16", go_on=lambda: None)
    assert sums == {block_of(name): sum_of(each, BFLOAT16) for name, each in tensors.items()}
    assert differing(sums, {**sums, "3": 0, "10": 0, "": 1}) == ["block 3", "the rest"]


def test_workers_have_parts_of_a_parameter_or_several_have_the_same_one():
    one, other = {"0.q.weight": 5, "norm.weight": 7}, {"0.q.weight": 6, "norm.weight": 7}
    assert sums_of_workers([one, other]) == {"0": 11, "": 7}
    assert sums_of_workers([one]) == {"0": 5, "": 7}
    assert sums_of_workers([{"0.k": 1}, {"0.k": 1}, {"0.k": 2}, {"0.k": 2}]) == {"0": 3}


# --- Comparison ---------------------------------------------------------------------------


@dataclass
class HoldingEngine:
    """Holds q and k as one tensor, with q halved if `halving`."""

    tensors: dict[str, torch.Tensor]
    halving: bool = False
    ignores: bool = False
    keeps_cache: bool = False
    facts: EngineFacts = field(
        default=EngineFacts(
            vocabulary=9,
            max_length=9,
            model_length=9,
            dtype="bfloat16",
            device="cpu",
            name="fake",
            end_tokens=(),
        )
    )

    def load(self, directory: Path) -> frozenset[str]:
        if not self.ignores:
            self.tensors = load_file(directory / "model.safetensors")
        return frozenset()

    def weight_sums(self) -> dict[str, int]:
        q, k = (self.tensors[f"layers.0.{name}.weight"] for name in "qk")
        fused = torch.cat([k, q / 2 if self.halving else q])
        return sums_of([("model.layers.0.qk.weight", sum_of(fused, BFLOAT16))])

    def reset_prefix_cache(self) -> bool:
        return not self.keeps_cache


def write(directory: Path, *, seed: int) -> Path:
    directory.mkdir()
    tensors = {"layers.0.q.weight": some(4, 8, seed=seed), "layers.0.k.weight": some(2, 8)}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return directory


def write_version(directory: Path, *, seed: int, summed: bool = False) -> LoadableVersion:
    write(directory, seed=seed)
    sums = TensorSums("bfloat16")
    tensors = dict(sums.summing(read_tensors(directory)))
    manifest = Manifest(
        version="run/v1",
        run_id="run",
        step=1,
        dtype="bfloat16",
        tensors=len(tensors),
        sums=sums.by_tensor() if summed else {},
        created="2026-01-01T00:00:00Z",
        files=[checksum_file(file) for file in sorted(directory.iterdir())],
    )
    (directory / "manifest.json").write_text(manifest.model_dump_json())
    return LoadableVersion(name="run/v1", path=directory)


def loaded(engine: HoldingEngine, base: Path, version: LoadableVersion) -> float:
    loader = Loader(engine, base=base, tolerance=0.5)
    loader.place(verified := loader.verify(version, lambda: None))
    return loader.confirm(verified)


def engine_with(base: Path, **arguments: bool) -> HoldingEngine:
    engine = HoldingEngine({}, **arguments)
    engine.load(base)
    return engine


@pytest.mark.parametrize("summed", [False, True])
def test_a_version_whose_numbers_the_engine_holds_is_confirmed(tmp_path: Path, summed: bool):
    """With sums in the manifest, or those of its files."""
    base = write(tmp_path / "base", seed=1)
    version = write_version(tmp_path / "v1", seed=2, summed=summed)
    assert np.isnan(loaded(engine_with(base), base, version))


def test_the_trainers_sums_count_and_not_the_files(tmp_path: Path):
    """A file that is wrong with a right checksum does not prove itself."""
    base = write(tmp_path / "base", seed=1)
    version = write_version(tmp_path / "v1", seed=2, summed=True)
    manifest = Manifest.model_validate_json((version.path / "manifest.json").read_bytes())
    wrong = {**manifest.sums, "layers.0.k.weight": manifest.sums["layers.0.k.weight"] ^ 1}
    manifest = manifest.model_copy(update={"sums": wrong})
    (version.path / "manifest.json").write_text(manifest.model_dump_json())
    with pytest.raises(WeightsTouched, match="does not hold these weights"):
        loaded(engine_with(base), base, version)


def test_sums_in_another_type_than_the_engines_are_taken_from_the_files(tmp_path: Path):
    base = write(tmp_path / "base", seed=1)
    version = write_version(tmp_path / "v1", seed=2, summed=True)
    manifest = Manifest.model_validate_json((version.path / "manifest.json").read_bytes())
    manifest = manifest.model_copy(update={"dtype": "float32", "sums": {"layers.0.k.weight": 1}})
    (version.path / "manifest.json").write_text(manifest.model_dump_json())
    assert np.isnan(loaded(engine_with(base), base, version))


def test_a_version_is_refused_while_the_engine_keeps_keys_and_values_of_the_one_before(
    tmp_path: Path,
):
    base, version = write(tmp_path / "base", seed=1), write_version(tmp_path / "v1", seed=2)
    with pytest.raises(WeightsTouched, match="did not empty its prefix cache"):
        loaded(engine_with(base, keeps_cache=True), base, version)


def test_files_are_read_where_the_manifest_of_what_is_handed_over_is_damaged(tmp_path: Path):
    base = write(tmp_path / "base", seed=1)
    version = write_version(tmp_path / "v1", seed=2)
    loader = Loader(engine_with(base), base=base, tolerance=0.5)
    whole = common_pb2.Handoff(name=version.name, dtype="bfloat16", manifest=b"{")
    verified = loader.verify(replace(version, handoff=whole), lambda: None)
    assert "Manifest" in verified.handoff_failure
    assert verified.version.handoff is None and verified.sums
    other = (version.path / "manifest.json").read_text().replace(version.name, "run/v0")
    of_another = common_pb2.Handoff(name=version.name, dtype="bfloat16", manifest=other.encode())
    verified = loader.verify(replace(version, handoff=of_another), lambda: None)
    assert verified.handoff_failure == "its manifest is of run/v0"


@pytest.mark.parametrize("wanted", ["a version", "the base model"])
def test_an_engine_that_ignores_a_load_is_noticed(tmp_path: Path, wanted: str):
    base, version = write(tmp_path / "base", seed=1), write_version(tmp_path / "v1", seed=2)
    engine = engine_with(base)
    loader = Loader(engine, base=base, tolerance=0.5)
    if wanted == "the base model":
        engine.load(version.path)
        version = LoadableVersion(name="base/tiny", path=base)
    engine.ignores = True
    loader.place(verified := loader.verify(version, lambda: None))
    with pytest.raises(WeightsTouched, match=r"does not hold these weights, .* in block 0"):
        loader.confirm(verified)


def test_an_engine_that_keeps_other_numbers_than_files_has_only_its_canary(tmp_path: Path):
    base, version = write(tmp_path / "base", seed=1), write_version(tmp_path / "v1", seed=2)
    engine = engine_with(base, halving=True)
    loader = Loader(engine, base=base, tolerance=0.5)
    for _ in range(2):
        loader.place(verified := loader.verify(version, lambda: None))
        assert np.isnan(loader.confirm(verified))
    assert verified.sums is None
    engine.ignores = True
    loader.place(verified := loader.verify(LoadableVersion("base/tiny", base), lambda: None))
    with pytest.raises(WeightsTouched):
        loader.confirm(verified)


def test_files_are_read_in_threads_and_the_damaged_one_is_named(tmp_path: Path):
    base = write(tmp_path / "base", seed=1)
    engine = engine_with(base)
    version = write_version(tmp_path / "v1", seed=2)
    (version.path / "model.safetensors").unlink()
    for name in "qk":
        tensors = {f"layers.0.{name}.weight": some(4 if name == "q" else 2, 8, seed=ord(name))}
        save_file(tensors, version.path / f"{name}.safetensors")
    entries = [checksum_file(file) for file in sorted(version.path.glob("*.safetensors"))]
    about = Manifest.model_validate_json((version.path / "manifest.json").read_bytes())
    about = about.model_copy(update={"files": entries})
    (version.path / "manifest.json").write_text(about.model_dump_json())
    caller, readers = threading.current_thread(), set()

    def go_on() -> None:
        readers.add(threading.current_thread())

    loader = Loader(engine, base=base, tolerance=0.5)
    several = loader.verify(version, go_on)
    assert caller not in readers or len(os.sched_getaffinity(0)) == 1
    loader._threads = 1
    one = loader.verify(version, go_on)
    assert caller in readers and several.sums == one.sums != engine.weight_sums()
    damaged = version.path / "q.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with pytest.raises(LoadFailed, match=r"q\.safetensors is damaged"):
        loader.verify(version, go_on)
