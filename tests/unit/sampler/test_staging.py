from __future__ import annotations

import json
import threading
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from structlog.testing import capture_logs

from sampler_service.weights.files import read_tensors
from sampler_service.weights.staging import staged, staging_threads

MIB = 2**20
ODD = {
    "flags": torch.tensor([True, False, True]),
    "an odd place": torch.arange(7, dtype=torch.float32).to(torch.bfloat16),
    "nothing": torch.zeros(0, 5, dtype=torch.float16),
    "a number": torch.tensor(2.5, dtype=torch.float64),
    "counts": torch.arange(-4, 8).view(2, 2, 3),
    "eighths": torch.arange(9, dtype=torch.float32).to(torch.float8_e4m3fn).view(3, 3),
    "several slices": torch.randint(-99, 99, (35 * MIB + 3,), dtype=torch.int8),
    "last": torch.randn(3, 5),
}
TYPES = {
    torch.bool: "BOOL",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def write_in_order(file: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """safetensors itself would sort the tensors by alignment."""
    header, place = {}, 0
    for name, tensor in tensors.items():
        end = place + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {
            "dtype": TYPES[tensor.dtype],
            "shape": shape,
            "data_offsets": [place, end],
        }
        place = end
    about = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(about).to_bytes(8, "little") + about)
        for tensor in tensors.values():
            stream.write(raw(tensor))
    return file


def threads_left() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("staging")]


def open_files(folder: Path) -> list[str]:
    """Files of one folder only. Earlier tests may have left others open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of this listing
            found.append(str(descriptor.readlink()))
    return [each for each in found if each.startswith(str(folder))]


class Memory:
    """Notes all allocations, and the most bytes at once."""

    def __init__(self, *, refuses_after: int = 99) -> None:
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []
        self.most = 0
        self._refuses_after = refuses_after

    def __call__(self, size: int) -> torch.Tensor:
        if len(self.storages) == self._refuses_after:
            raise torch.OutOfMemoryError("CUDA out of host memory")
        memory = torch.empty(size, dtype=torch.uint8)
        self.storages.append(weakref.ref(memory.untyped_storage()))
        kept = (storage() for storage in self.storages)
        self.most = max(self.most, sum(each.nbytes() for each in kept if each is not None))
        return memory


def test_tensors_of_any_type_shape_and_place_are_those_of_the_file(tmp_path: Path):
    write_in_order(tmp_path / "1.safetensors", ODD)
    write_in_order(tmp_path / "2.safetensors", {"other": torch.randn(33)})
    memory = Memory()
    with staged(
        read_tensors(tmp_path), threads=3, allocate=memory, ahead=MIB, most=40 * MIB
    ) as tensors:
        found = list(tensors)  # all are kept, so no memory is reused
    assert len(memory.storages) == len(found) - 1, "what is empty needs none"
    expected = list(read_tensors(tmp_path))
    assert [name for name, _ in found] == [name for name, _ in expected] == [*ODD, "other"]
    for (name, one), (_, other) in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert raw(one) == raw(other), name
    assert not threads_left()


def numbered(count: int, *, size: int = MIB) -> list[tuple[str, torch.Tensor]]:
    return [(str(n), torch.full((size,), n, dtype=torch.uint8)) for n in range(count)]


def test_so_much_is_staged_ahead_and_a_larger_tensor_alone():
    sources = numbered(9)
    sources.insert(4, ("large", torch.ones(5 * MIB, dtype=torch.uint8)))
    memory = Memory()
    with staged(sources, threads=2, allocate=memory, ahead=3 * MIB) as tensors:
        sums = {name: int(tensor.sum()) for name, tensor in tensors}
    assert sums == {name: int(tensor.sum()) for name, tensor in sources}
    assert len(memory.storages) == len(sources)
    assert memory.most == 8 * MIB, "the large one is in use while the next are staged"


def test_a_tensor_beyond_the_bound_is_as_it_is_stored_and_the_others_are_staged():
    sources = [*numbered(2), ("large", torch.ones(5 * MIB)), *numbered(2)]
    memory = Memory()
    with staged(sources, threads=2, allocate=memory, ahead=MIB, most=4 * MIB) as tensors:
        found = [tensor for _, tensor in tensors]
    assert found[2] is sources[2][1] and len(memory.storages) == 4


def test_what_is_taken_and_kept_has_a_bound_above_which_tensors_are_as_they_are_stored():
    memory = Memory()
    with staged(numbered(9), threads=2, allocate=memory, ahead=MIB, most=4 * MIB) as tensors:
        kept = dict(tensors)
    assert len(memory.storages) == 4 and memory.most == 4 * MIB
    assert all((tensor == int(name)).all() for name, tensor in kept.items())


def test_without_memory_the_rest_is_as_it_is_stored_and_the_log_says_so():
    sources = numbered(5)
    with (
        capture_logs() as logs,
        staged(sources, threads=2, allocate=Memory(refuses_after=2), ahead=MIB) as tensors,
    ):
        found = [tensor for _, tensor in tensors]
    stored = [found[n] is sources[n][1] for n in range(5)]
    assert stored == [False, False, True, True, True]
    assert all((tensor == n).all() for n, tensor in enumerate(found))
    assert [(log["event"], log.get("others")) for log in logs] == [
        ("weights_not_staged", None),
        ("weights_staged", 3 * MIB),
    ]


def test_an_error_between_two_files_and_an_engine_that_refuses_leave_nothing(tmp_path: Path):
    write_in_order(tmp_path / "1.safetensors", ODD)
    (tmp_path / "2.safetensors").write_bytes(b"no safetensors")
    for refuses, error in ((False, SafetensorError), (True, KeyError)):
        with (
            pytest.raises(error),
            staged(read_tensors(tmp_path), threads=2, allocate=Memory(), ahead=0) as tensors,
        ):
            for name, _ in tensors:
                if refuses:
                    raise KeyError(name)
        assert not threads_left() and not open_files(tmp_path)


def test_a_cpu_and_an_engine_of_many_workers_stage_nothing():
    assert staging_threads("cpu", workers=1) == staging_threads("cuda", workers=8) == 0
    assert 1 <= staging_threads("cuda", workers=4) <= staging_threads("cuda", workers=1) <= 8
    stored = torch.arange(4)
    with staged([("a", stored)], threads=0) as tensors:
        assert next(tensors)[1] is stored
