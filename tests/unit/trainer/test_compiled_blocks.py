"""Compiled blocks compute the results of plain blocks, and are compiled once.

These tests leave out machine code, which takes a minute for each kind of block. Tests of
recompilation also leave out gradient graphs. `make nightly` has it all."""

from __future__ import annotations

import functools
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._dynamo.exc import InternalTorchDynamoError
from torch._inductor.exc import InvalidCxxCompiler

from tandem.backends.memory import Available
from tandem.errors import WorkerStartFailed
from tandem.protocol.worker import LoraSpec
from tests.support.architectures import WINDOW, write_model
from tests.support.local_trainer import (
    WITHOUT_MLP,
    batch_of,
    compute,
    data_of,
    gradients,
    logprobs,
    make_rank,
)
from tests.support.losses.batches import REQUESTS, mixed_data, mixed_request
from tests.support.tiny_model import VOCABULARY
from tests.support.trainer_worker import datum, request
from tests.unit.trainer.test_sharing import SPECS, add, forward_backward, host, step, trainer_of
from trainer_service.backends import World
from trainer_service.backends.fsdp2 import Fsdp2Backend
from trainer_service.models import compiled_blocks
from trainer_service.models.compiled_blocks import check_compiler
from trainer_service.models.logprobs import CompiledLogSoftmax

CHUNKS = {"logits_bytes": 4 * VOCABULARY * 7}
KINDS = {
    "packed": {},
    "padded": {"packing": "off"},
    "checkpointed": {"checkpointing": "on"},
    "in chunks": CHUNKS,
    "in threads": {"parallel": 2},
}


@pytest.fixture(autouse=True)
def anew():
    """Compiled code belongs to model classes, which tests share. Its tensors have no data, which
    breaks tests that count tensors."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs_alone(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.fixture
def forward_graphs_alone(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def assert_same(compiled, plain, request_name: str) -> None:
    """Compare up to another order of additions."""
    found, wanted = (compute(each, mixed_request(request_name)) for each in (compiled, plain))
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=0, atol=1e-5)
    assert found.metrics == pytest.approx(wanted.metrics, rel=1e-4, abs=1e-5)
    assert_same_gradients(compiled, plain)


def assert_same_gradients(compiled, plain) -> None:
    found, wanted = gradients(compiled), gradients(plain)
    assert found.keys() == wanted.keys()
    largest = max(float(each.abs().max()) for each in wanted.values())
    for name, each in wanted.items():
        torch.testing.assert_close(found[name], each, rtol=1e-5, atol=1e-5 * largest)
    compiled.drop_gradients()
    plain.drop_gradients()


def compiled_rank(path, lora=None, **settings):
    trainer = make_rank(path, lora, compile="on", **settings)
    trainer.warm_up()
    return trainer


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("in threads", None),
        ("checkpointed", WITHOUT_MLP),
        pytest.param("in chunks", None, marks=pytest.mark.nightly),
    ],
)
def test_every_loss_has_the_same_gradients(model, graphs_alone, kind, lora):
    path, settings = model, KINDS[kind]
    plain, compiled = make_rank(path, lora, **settings), compiled_rank(path, lora, **settings)
    # Beside other threads, guards of torch 2.13 may fail for a moment. Then torch compiles again.
    with torch.compiler.set_stance("default" if "parallel" in settings else "fail_on_recompile"):
        for name in REQUESTS:
            assert_same(compiled, plain, name)


@pytest.mark.parametrize("packing", ["on", pytest.param("off", marks=pytest.mark.nightly)])
def test_neither_new_lengths_nor_new_rows_are_compiled_again(model, graphs_alone, packing):
    trainer = compiled_rank(model, packing=packing, micro_batch_tokens=64)
    with torch.compiler.set_stance("fail_on_recompile"):
        batches = [mixed_data(count, seed) for seed, count in enumerate((1, 2, 7, 12))]
        for data in (*batches, [datum([5], weights=[1.0])]):
            message = request(data)
            trainer.forward_backward(batch_of(trainer, message))
            message.forward_only = True
            trainer.forward_backward(batch_of(trainer, message))


def test_blocks_that_are_checkpointed_for_one_batch_are_not_compiled_again(model, graphs_alone):
    """For a sequence longer than a planned micro-batch, which otherwise does not fit."""
    trainer = compiled_rank(model, micro_batch_tokens=16)
    trainer.backend.plan = replace(trainer.backend.plan, available=Available(device=0))
    with torch.compiler.set_stance("fail_on_recompile"):
        for length, checkpointed in ((64, True), (16, False), (40, True)):
            data = [datum(range(3, 3 + length), weights=[1.0] * length)]
            trainer.forward_backward(batch_of(trainer, request(data)))
            assert trainer.backend._checkpointing.on == checkpointed


def test_runs_that_share_a_model_compute_with_their_own_adapters(model, forward_graphs_alone):
    together = host(model, "a", "b", compile="on")
    alone = {run_id: trainer_of(model, run_id) for run_id in "ab"}
    for number in range(2):
        for run_id, plain in alone.items():
            mine = together.take_turn(run_id)
            found, wanted = (forward_backward(each, data_of(number)) for each in (mine, plain))
            assert dict(found.metrics) == pytest.approx(dict(wanted.metrics), rel=1e-5)
            assert step(mine) == pytest.approx(step(plain), rel=1e-4)


def test_windows_of_padded_rows_are_compiled_once_for_rows_within_and_beyond_them(
    tmp_path, forward_graphs_alone
):
    path = write_model(tmp_path, "mistral", num_hidden_layers=1)
    settings = {"packing": "off", "micro_batch_tokens": 64}
    plain, compiled = make_rank(path, **settings), compiled_rank(path, **settings)
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (WINDOW - 2, 3 * WINDOW):
            data = [datum([*range(2, length)], weights=[1.0] * (length - 2))] * 2
            found, wanted = (compute(each, request(data)) for each in (compiled, plain))
            np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=0, atol=1e-5)
            assert_same_gradients(compiled, plain)


def log_softmax(logits, targets, gradient, *, compute=None):
    """Log probabilities, and the logits' gradient."""
    leaf = logits.detach().requires_grad_()
    if compute is None:
        wide = leaf.to(torch.promote_types(leaf.dtype, torch.float32))
        found = torch.log_softmax(wide, -1).gather(-1, targets)
    else:
        found = compute(leaf, targets)
    found.backward(gradient.to(found.dtype))
    return found.detach(), leaf.grad


@pytest.mark.parametrize(
    ("dtype", "close", "rounding"),
    [
        (torch.float64, 1e-12, 1e-12),
        (torch.float32, 1e-5, 1e-6),
        (torch.bfloat16, 1e-5, 2**-8),
    ],
)
def test_compiled_log_probabilities_are_those_of_torch(graphs_alone, dtype, close, rounding):
    """Also of one row, of several targets of a row, and of equal ones."""
    torch.manual_seed(0)
    compute = CompiledLogSoftmax()
    for rows, targets in ((13, 1), (13, 3), (1, 1), (1, 3), (40, 2)):
        logits = (20 * torch.randn(rows, 30)).to(dtype)
        logits[0] += 1e4  # the sum of its exponentials overflows
        chosen = torch.randint(0, 30, (rows, targets))
        chosen[-1] = 7
        gradient = torch.randn(rows, targets)
        found = log_softmax(logits, chosen, gradient, compute=compute)
        wanted = log_softmax(logits, chosen, gradient)
        assert found[0].dtype == wanted[0].dtype and found[1].dtype == dtype
        torch.testing.assert_close(found[0], wanted[0], rtol=close, atol=close)
        torch.testing.assert_close(found[1], wanted[1], rtol=rounding, atol=rounding)


def test_neither_other_rows_nor_other_targets_compile_log_probabilities_again(
    forward_graphs_alone,
):
    compute = CompiledLogSoftmax()

    def of(rows: int, targets: int, *, gradients: bool) -> None:
        logits = torch.randn(rows, 30, requires_grad=gradients)
        found = compute(logits, torch.randint(0, 30, (rows, targets)))
        if gradients:
            found.sum().backward()

    of(251, 1, gradients=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows, targets in ((250, 1), (1, 1), (2, 3), (30, 30), (512, 2)):
            of(rows, targets, gradients=True)
            of(rows, targets, gradients=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_log_probabilities_take_the_memory_of_the_plan(graphs_alone, dtype):
    """Without fused kernels here, so only tensors that are kept for the gradients count."""
    compute, kept = CompiledLogSoftmax(), []
    logits = torch.randn(20, 30).to(dtype).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        compute(logits, torch.zeros(20, 1, dtype=torch.int64))
    large = [each for each in kept if each.numel() == logits.numel()]
    assert [each.data_ptr() for each in large] == [logits.data_ptr()]


def test_adapters_of_a_new_shape_are_compiled_in_an_operation_that_says_so(
    model, forward_graphs_alone, monkeypatch
):
    warm_up, said = Fsdp2Backend.warm_up, []
    runs = host(model, "a", compile="on")
    alike = SPECS["a"].model_copy(update={"lora": LoraSpec(rank=4, seed=9)})
    add(runs, "like a", alike)
    add(runs, "b")

    def slow(backend):
        said.append((runs.operations_of(now).progress.read().compiling, now))
        warm_up(backend)

    monkeypatch.setattr(Fsdp2Backend, "warm_up", slow)
    for now in ("a", "like a", "b", "a"):
        turn = runs.take_turn(now)
        turn.progress.begin_batch(7)
        logprobs(turn, data_of(1, count=2))
        assert not turn.progress.read().compiling
    assert said == [(True, "a"), (True, "b")]


@pytest.mark.parametrize(
    ("device", "cores", "ranks", "threads"),
    [("cpu", 16, 1, 1), ("cuda", 16, 1, 8), ("cuda", 16, 4, 4), ("cuda", 2, 4, 1)],
)
def test_several_kernels_are_compiled_at_once_beside_a_gpu(
    monkeypatch, device, cores, ranks, threads
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    backend = object.__new__(Fsdp2Backend)
    backend._world = World(rank=0, size=ranks, device=device, on_node=ranks)
    assert backend._compile_threads == threads


def test_processors_share_no_code(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        compiled_blocks.compile_blocks([], threads=1)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / compiled_blocks.processor())


def test_a_trainer_without_a_compiler_does_not_start(monkeypatch):
    def no_compiler():
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", no_compiler)
    with pytest.raises(WorkerStartFailed, match="has none: install"):
        check_compiler("cpu")
    monkeypatch.setenv("CC", "no compiler")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(WorkerStartFailed, match="need a C compiler"):
        check_compiler("cuda")


def test_what_cannot_be_compiled_is_refused_with_the_model_s_name():
    with (
        pytest.raises(WorkerStartFailed, match="the blocks of Odd cannot be compiled: no way"),
        compiled_blocks.compiling("Odd"),
    ):
        raise InternalTorchDynamoError("no way")
