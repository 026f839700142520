from __future__ import annotations

import errno
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tandem.errors import CannotSleep, OutOfMemory, StorageFailed, StorageFull
from tandem.v1 import common_pb2, trainer_pb2
from tests.support.fake_device import FakeDevice, offload_of
from tests.support.local_trainer import (
    SPEC,
    WITHOUT_MLP,
    data_of,
    forward_backward,
    gradients,
    load,
    make,
    model_of,
    weights,
)
from trainer_service.backends.base import Capability, LiveState
from trainer_service.checkpoints import training_state
from trainer_service.compute import offload as module
from trainer_service.compute.device_memory import CpuMemory
from trainer_service.compute.offload import Offload
from trainer_service.service.operations import Operations

PARAMS = {
    "adamw": {
        "adamw": trainer_pb2.AdamWParams(
            learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01
        )
    },
    "dimuon": {"dimuon": trainer_pb2.DiMuonParams(learning_rate=1e-2, beta1=0.9)},
}
KINDS = [
    pytest.param("qwen3", None, "adamw", id="full-adamw-tied"),
    pytest.param("llama", None, "dimuon", id="full-dimuon"),
    pytest.param("qwen3", SPEC, "adamw", id="lora-adamw"),
    pytest.param("qwen3_moe", WITHOUT_MLP, "dimuon", id="lora-dimuon"),
]


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    """Storages in several blocks, blocks with several storages, and many batches."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(module, "_BATCH_BYTES", 8192)


def step(operations: Operations, optimizer: str = "adamw", *, snapshot: str = "") -> None:
    request = trainer_pb2.OptimStepRequest(snapshot=snapshot, **PARAMS[optimizer])
    reply = operations.optim_step(request)
    assert not reply.HasField("failure"), reply.failure


def live(operations: Operations) -> list[torch.Tensor]:
    state = operations.trainer.backend.live_state()
    return [*state.optimizer, *state.gradients, *state.parameters]


def copies(operations: Operations) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in live(operations)]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(
        a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in ((a.detach().reshape(-1), b.detach().reshape(-1)) for a, b in pairs)
    )


class Tensors:
    device = "cpu"
    capabilities = frozenset({Capability.SLEEP})

    def __init__(self, parameters: list[torch.Tensor], **others: list[torch.Tensor]) -> None:
        optimizer, held = others.get("optimizer", []), others.get("gradients", [])
        self._state = LiveState(optimizer=optimizer, gradients=held, parameters=parameters)

    def live_state(self) -> LiveState:
        return self._state


def offload_tensors(
    parameters: list[torch.Tensor], *, device: FakeDevice | None = None, **others: Any
) -> Offload:
    backends: Any = [Tensors(parameters, **others)]
    return Offload(lambda: backends, memory=device or FakeDevice())


# --- To host memory ---------------------------------------------------------------------------


@pytest.mark.parametrize(("architecture", "lora", "optimizer"), KINDS)
def test_all_state_leaves_the_device_and_comes_back_bit_by_bit(
    models, small_blocks, architecture, lora, optimizer
):
    operations = make(models[architecture], lora, optimizer=optimizer)
    forward_backward(operations, data_of(1))
    step(operations, optimizer)
    forward_backward(operations, data_of(2))
    offload = offload_of(operations, device := FakeDevice())
    before, objects = copies(operations), live(operations)
    total = sum(t.untyped_storage().nbytes() for t in dict.fromkeys(objects))

    reply = offload.sleep()
    assert offload.asleep
    assert {tensor.untyped_storage().nbytes() for tensor in objects} == {0}
    assert (reply.bytes_moved, reply.host_bytes, reply.device_bytes) == (total, total, 0)
    assert device.given_back == 1
    assert device.waits > 1  # batches are emptied after their copy

    reply = offload.wake()
    assert not offload.asleep
    assert (reply.bytes_moved, reply.host_bytes, reply.device_bytes) == (total, 0, total)
    assert same(live(operations), before)
    assert all(a is b for a, b in zip(live(operations), objects, strict=True))


@pytest.mark.parametrize(
    ("architecture", "lora", "optimizer", "dtype"),
    [*((*kind.values, "float32") for kind in KINDS), ("qwen3", None, "adamw", "bfloat16")],
)
def test_a_trainer_that_slept_goes_on_as_one_that_did_not(
    models, architecture, lora, optimizer, dtype
):
    undisturbed, other = (
        make(models[architecture], lora, optimizer=optimizer, dtype=dtype) for _ in range(2)
    )
    offload = offload_of(other)
    for number in range(3):
        for operations in (undisturbed, other):
            forward_backward(operations, data_of(number))
        offload.sleep()
        offload.wake()
        for operations in (undisturbed, other):
            step(operations, optimizer)
    assert same(list(weights(other).values()), list(weights(undisturbed).values()))


def test_tied_weights_and_views_stay_tied(small_blocks):
    base = torch.arange(3000.0)
    tied = nn.Parameter(base.view(3, 1000))
    row, strided = tied.detach()[1], base[::7]
    offload = offload_tensors([tied, tied, row, strided])
    reply = offload.sleep()
    assert reply.bytes_moved == 12_000  # once
    offload.wake()
    assert torch.equal(base, torch.arange(3000.0))
    with torch.no_grad():
        tied[1] = -1.0
    assert row.eq(-1.0).all()
    assert torch.equal(strided, base[::7])


def test_any_kind_of_tensor_comes_back(small_blocks):
    def tensors() -> list[torch.Tensor]:
        made = torch.Generator().manual_seed(1)
        return [
            torch.randn(777, generator=made).bfloat16(),
            torch.full((5,), torch.nan),
            torch.tensor(3.0),
            torch.empty(0),
            torch.empty(4, 0, 2, dtype=torch.int64),
            torch.randint(-9, 9, (1000, 3), generator=made).t(),
            torch.tensor([True, False]),
        ]

    kept = tensors()
    offload = offload_tensors(kept)
    offload.sleep()
    offload.wake()
    assert same(kept, tensors())


def test_optimizer_state_goes_first_and_parameters_last_until_enough_is_free():
    optimizer, held, parameter = (torch.zeros(1000) for _ in range(3))
    others = {"optimizer": [optimizer], "gradients": [held]}
    for enough, gone in [(1, 1), (4000, 1), (4001, 2), (8001, 3), (10**9, 3), (0, 3)]:
        offload = offload_tensors([parameter], **others)
        reply = offload.sleep(enough_bytes=enough)
        sizes = [each.untyped_storage().nbytes() for each in (optimizer, held, parameter)]
        assert sizes == [0] * gone + [4000] * (3 - gone)
        assert (reply.host_bytes, reply.device_bytes) == (4000 * gone, 4000 * (3 - gone))
        offload.wake()


def test_host_memory_is_kept_for_the_next_sleep(small_blocks):
    offload = offload_tensors([torch.zeros(5000)], device=(device := FakeDevice()))
    for _ in range(3):
        offload.sleep()
        offload.wake()
    assert device.host_blocks == [4096] * 5


def test_a_trainer_that_grew_gets_more_host_memory(small_blocks):
    parameters = [torch.arange(500.0)]
    offload = offload_tensors(parameters, device=(device := FakeDevice()))
    offload.sleep()
    offload.wake()
    parameters.append(torch.arange(3000.0))
    offload.sleep()
    offload.wake()
    assert torch.equal(parameters[1], torch.arange(3000.0))
    assert device.host_blocks == [2048, 4096, 4096, 4096]


@pytest.mark.parametrize("most", [0, 1, 4])
def test_without_enough_host_memory_it_stays_awake_and_unharmed(models, small_blocks, most):
    operations = make(models["qwen3"], None)
    forward_backward(operations, data_of(1))
    device = FakeDevice(most=most)
    offload = offload_of(operations, device)
    before = copies(operations)
    with pytest.raises(OutOfMemory, match="too little host memory"):
        offload.sleep()
    assert not offload.asleep
    assert same(live(operations), before)
    device.most = 10**6
    offload.sleep()
    offload.wake()
    assert same(live(operations), before)


@pytest.mark.parametrize("spilled", [False, True])
def test_without_room_on_the_device_it_stays_asleep_and_can_wake_later(
    tmp_path, monkeypatch, spilled
):
    parameters = [torch.arange(100.0), torch.arange(200.0), torch.arange(300.0)]
    offload = offload_tensors(parameters)
    offload.sleep(spill_folder=str(tmp_path) if spilled else "")
    resize = torch.UntypedStorage.resize_
    with monkeypatch.context() as patch:

        def fail(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            if size == 800:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 800 B.")
            return resize(storage, size)

        patch.setattr(torch.UntypedStorage, "resize_", fail)
        with pytest.raises(OutOfMemory, match="cannot wake"):
            offload.wake()
    assert offload.asleep
    assert {each.untyped_storage().nbytes() for each in parameters} == {0}
    offload.wake()
    assert all(torch.equal(each, torch.arange(float(len(each)))) for each in parameters)


# --- To a file --------------------------------------------------------------------------------


def test_a_state_that_needs_more_than_it_may_take_stays_where_it_is(tmp_path):
    parameter = torch.arange(1000.0)
    offload = offload_tensors([parameter], device=(device := FakeDevice()))
    with pytest.raises(OutOfMemory, match="4000 bytes, and 3999 are left for it in host memory"):
        offload.sleep(most_bytes=3999)
    with pytest.raises(StorageFull, match="3999 are left for it on the disk"):
        offload.sleep(most_bytes=3999, spill_folder=str(tmp_path))
    assert not offload.asleep
    assert not device.host_blocks
    offload.sleep(most_bytes=4000)
    offload.wake()
    assert torch.equal(parameter, torch.arange(1000.0))


def test_a_state_that_stays_in_the_hosts_memory_takes_no_more_of_it():
    backends: Any = [Tensors([torch.zeros(1000)])]
    offload = Offload(lambda: backends, memory=CpuMemory())
    offload.sleep(most_bytes=1)
    assert offload.asleep


def test_a_trainer_whose_state_goes_to_a_file_gives_its_pinned_memory_back(tmp_path, small_blocks):
    offload = offload_tensors([torch.zeros(2000)], device=(device := FakeDevice()))
    for spill in ("", str(tmp_path), ""):
        offload.sleep(spill_folder=spill)
        offload.wake()
    buffers = [4096, 4096]  # for writing and reading
    assert device.host_blocks == [4096, 4096, *buffers, 4096, 4096]


@pytest.mark.parametrize("device", [FakeDevice, lambda: None], ids=["device", "cpu"])
@pytest.mark.parametrize(("architecture", "lora", "optimizer"), KINDS)
def test_state_is_spilled_to_a_file_and_comes_back_bit_by_bit(
    models, tmp_path, small_blocks, architecture, lora, optimizer, device
):
    operations = make(models[architecture], lora, optimizer=optimizer)
    trainer = operations.trainer
    forward_backward(operations, data_of(1))
    step(operations, optimizer)
    forward_backward(operations, data_of(2))
    offload = Offload(lambda: [trainer.backend], memory=device())
    before, total = copies(operations), offload.switch_reply().device_bytes
    parameters = list(model_of(operations).parameters())
    for _ in range(2):
        reply = offload.sleep(spill_folder=str(tmp_path / "spilled"))
        assert (reply.disk_bytes, reply.host_bytes, reply.device_bytes) == (total, 0, 0)
        assert {tensor.untyped_storage().nbytes() for tensor in live(operations)} == {0}
        reply = offload.wake()
        assert (reply.disk_bytes, reply.device_bytes) == (0, total)
        assert same(live(operations), before)
    assert all(a is b for a, b in zip(model_of(operations).parameters(), parameters, strict=True))


def test_the_file_has_no_name_that_could_be_left_behind(tmp_path):
    offload = offload_tensors([torch.zeros(1000)])
    offload.sleep(spill_folder=str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, StorageFull), (errno.EIO, StorageFailed)]
)
@pytest.mark.parametrize("when", ["write", "sync"])
def test_a_disk_that_fails_leaves_the_trainer_awake_and_unharmed(
    models, tmp_path, monkeypatch, number, kind, when
):
    operations = make(models["qwen3"], None)
    forward_backward(operations, data_of(1))
    trainer = operations.trainer
    offload = Offload(lambda: [trainer.backend])
    before = copies(operations)

    def fail(*_: object) -> None:
        raise OSError(number, "the disk says no")

    with monkeypatch.context() as patch:
        if when == "sync":
            patch.setattr(module.os, "fsync", fail)
        else:
            file = SimpleNamespace(write=fail, close=fail)
            patch.setattr(module.tempfile, "TemporaryFile", lambda **_: file)
        with pytest.raises(kind, match="the disk says no"):
            offload.sleep(spill_folder=str(tmp_path))
    assert not offload.asleep
    assert same(live(operations), before)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_leaves_the_trainer_awake(tmp_path):
    (tmp_path / "file").touch()
    offload = offload_tensors([torch.zeros(1000)])
    with pytest.raises(StorageFailed):
        offload.sleep(spill_folder=str(tmp_path / "file" / "folder"))
    assert not offload.asleep


@pytest.mark.parametrize("damage", ["shorter", "changed"])
def test_a_file_that_is_not_what_was_written_wakes_nobody(tmp_path, damage):
    parameter = torch.arange(1000.0)
    offload = offload_tensors([parameter])
    offload.sleep(spill_folder=str(tmp_path))
    assert offload._moved is not None
    file: Any = offload._moved.file
    if damage == "shorter":
        file.truncate(1000)
    else:
        file.seek(500)
        file.write(b"?")
    with pytest.raises(StorageFailed, match="has changed"):
        offload.wake()
    assert offload.asleep
    assert parameter.untyped_storage().nbytes() == 0


def test_a_snapshot_that_is_still_written_is_of_the_state_before_the_sleep(
    models, tmp_path, monkeypatch
):
    asleep = threading.Event()
    write = training_state.write_shards

    def write_once_asleep(*arguments: Any, **more: Any) -> Any:
        assert asleep.wait(60)
        return write(*arguments, **more)

    operations = make(models["qwen3"], None)
    trainer = operations.trainer
    offload = Offload(lambda: [trainer.backend])
    path = tmp_path / "run" / "s1"
    monkeypatch.setattr(training_state, "write_shards", write_once_asleep)
    forward_backward(operations, data_of(1))
    step(operations, snapshot=str(path))
    expected = weights(operations)
    offload.sleep(spill_folder=str(tmp_path))
    asleep.set()
    reply = operations.snapshots.result(str(path)).result(timeout=60)
    assert not reply.HasField("failure"), reply.failure
    offload.wake()
    other = make(models["qwen3"], None)
    assert not load(other, path).HasField("failure")
    assert same(list(weights(other).values()), list(expected.values()))


# --- On a CPU ---------------------------------------------------------------------------------


def test_on_a_cpu_nothing_moves(models):
    operations = make(models["qwen3"], None)
    forward_backward(operations, data_of(1))
    trainer = operations.trainer
    offload = Offload(lambda: [trainer.backend])
    places = [tensor.data_ptr() for tensor in live(operations)]
    total = offload.switch_reply().device_bytes
    reply = offload.sleep()
    assert offload.asleep
    assert (reply.bytes_moved, reply.host_bytes, reply.device_bytes) == (0, 0, total)
    reply = offload.wake()
    assert (reply.bytes_moved, reply.device_bytes) == (0, total)
    assert [tensor.data_ptr() for tensor in live(operations)] == places


# --- The operations ---------------------------------------------------------------------------


def test_a_sleeping_trainer_is_asked_for_nothing(models):
    operations = make(models["qwen3"], None)
    offload_of(operations)
    forward_backward(operations, data_of(1))
    held = gradients(operations.trainer)
    operations.switching.sleep(common_pb2.SleepRequest())
    assert operations.describe().asleep
    with pytest.raises(AssertionError, match="while the trainer is asleep"):
        forward_backward(operations, data_of(2))
    with pytest.raises(AssertionError, match="while the trainer is asleep"):
        step(operations)
    operations.switching.wake()
    assert not operations.describe().asleep
    again = gradients(operations.trainer)
    assert held.keys() == again.keys()
    assert same(list(held.values()), list(again.values()))


def test_a_second_sleep_and_a_second_wake_move_nothing(models):
    switching = (operations := make(models["qwen3"], None)).switching
    offload_of(operations)
    first = switching.sleep(common_pb2.SleepRequest())
    again = switching.sleep(common_pb2.SleepRequest())
    assert first.bytes_moved > 0 == again.bytes_moved
    assert again.host_bytes == first.host_bytes
    assert switching.wake().bytes_moved == first.bytes_moved
    assert switching.wake().bytes_moved == 0


def test_a_sleep_that_fails_is_answered_with_the_failure_by_a_trainer_that_is_awake(models):
    operations = make(models["qwen3"], None)
    offload_of(operations, FakeDevice(most=0))
    reply = operations.switching.sleep(common_pb2.SleepRequest())
    assert reply.failure.type == "out_of_memory"
    assert (reply.bytes_moved, reply.host_bytes) == (0, 0)
    assert reply.device_bytes > 0
    assert not operations.switching.asleep
    forward_backward(operations, data_of(1))


def test_a_backend_that_does_not_know_how_to_sleep_says_so(models):
    operations = make(models["qwen3"], None)
    plain: Any = SimpleNamespace(device="cpu", capabilities=frozenset())
    operations.switching._offload = Offload(lambda: [plain])
    reply = operations.switching.sleep(common_pb2.SleepRequest())
    assert reply.failure.type == CannotSleep.type
    assert "SimpleNamespace does not know how to sleep" in reply.failure.message
    assert operations.switching.asleep, "its host suspends it"
    assert operations.switching.wake().failure.type == CannotSleep.type
    assert not operations.switching.asleep


COMMANDS = st.lists(
    st.one_of(
        st.tuples(st.just("forward_backward"), st.integers(0, 3)),
        st.tuples(st.just("forward"), st.integers(0, 3)),
        st.tuples(st.just("step"), st.just(0)),
        st.tuples(st.just("sleep"), st.sampled_from([0, 1, 30_000, 10**9])),
        st.tuples(st.just("spill"), st.sampled_from([0, 30_000])),
        st.tuples(st.just("wake"), st.just(0)),
    ),
    max_size=12,
)


@pytest.mark.parametrize(("architecture", "lora", "optimizer"), KINDS)
def test_sleeping_never_changes_a_bit(models, tmp_path_factory, architecture, lora, optimizer):
    folder = tmp_path_factory.mktemp("spilled")

    def result(path: Path, commands: list[tuple[str, int]], *, sleeps: bool) -> list[torch.Tensor]:
        operations = make(path, lora, optimizer=optimizer)
        offload_of(operations)
        switching = operations.switching
        for command, number in commands:
            if command in ("sleep", "spill"):
                if sleeps:
                    spill = str(folder) if command == "spill" else ""
                    request = common_pb2.SleepRequest(enough_bytes=number, spill_folder=spill)
                    assert not switching.sleep(request).HasField("failure")
                continue
            if sleeps:  # as the gateway does before an operation
                assert not switching.wake().HasField("failure")
            if command in ("forward", "forward_backward"):
                forward_backward(operations, data_of(number), forward_only=command == "forward")
            elif command == "step" and operations._held is not None:
                step(operations, optimizer)
        switching.wake()
        return copies(operations)

    @settings(max_examples=12, deadline=None)
    @given(COMMANDS)
    def check(commands: list[tuple[str, int]]) -> None:
        path = models[architecture]
        assert same(result(path, commands, sleeps=True), result(path, commands, sleeps=False))

    check()
