from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.gpu.moves import arrivals
from sampler_service.weights.files import read_tensors
from sampler_service.weights.staging import staged, staging_threads
from trainer_service.checkpoints.host_copies import HostCopies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

MIB = 2**20


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for number in range(2):
        tensors = {
            f"{number}.{n}": torch.randint(0, 256, (size * MIB + n,), dtype=torch.uint8)
            for n, size in enumerate((600, 1, 128, 0, 300, 64))
        }
        save_file(tensors, tmp_path / f"{number}.safetensors")
    return tmp_path


def test_tensors_that_an_engine_copies_from_pinned_memory_are_those_of_the_files(files: Path):
    threads = staging_threads("cuda", workers=1)
    with staged(read_tensors(files), threads=threads) as tensors:
        arrived = []
        for name, tensor in tensors:
            assert tensor.is_pinned() or not tensor.numel(), name
            arrived.append((name, torch.empty_like(tensor, device="cuda").copy_(tensor)))
            del tensor
    stored = list(read_tensors(files))
    assert [name for name, _ in arrived] == [name for name, _ in stored]
    for (name, expected), (_, tensor) in zip(stored, arrived, strict=True):
        assert torch.equal(tensor.cpu(), expected), name


def test_memory_is_taken_again_only_when_its_copy_has_ended(files: Path):
    """Nobody waits for the copies. Torch knows of them, because the memory is its own."""
    stream = torch.cuda.Stream()
    with (
        staged(read_tensors(files), threads=4, ahead=8 * MIB) as tensors,
        torch.cuda.stream(stream),
    ):
        arrived = [(name, tensor.to("cuda", non_blocking=True)) for name, tensor in tensors]
    torch.cuda.synchronize()
    expected = dict(read_tensors(files))
    assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in arrived)


def test_how_fast_files_arrive_is_told(files: Path):
    speed = arrivals(files, "cuda", rounds=3)
    print(f"from the page cache to the GPU, GB/s: {speed}")
    assert speed["staged"] > 0 and speed["mapped"] > 0


def test_pieces_of_a_tensor_on_a_gpu_are_its_bytes():
    copies = HostCopies()
    for size in (40 * MIB + 3, 0, 1, 16 * MIB):
        tensor = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
        found = b"".join(bytes(piece) for piece in copies.pieces(tensor))
        assert found == tensor.cpu().numpy().tobytes()
