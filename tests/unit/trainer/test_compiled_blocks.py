"""Compiled blocks compute what the blocks compute, and are compiled once.

The last step, the machine code, is left out, which takes a minute for each kind of block: torch
computes the graphs that it has made with its own operators. `make nightly` has it all.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch._dynamo.exc import InternalTorchDynamoError
from torch._inductor.exc import InvalidCxxCompiler

from tandem.errors import WorkerStartFailed
from tests.support.local_trainer import (
    SPEC,
    batch_of,
    compute,
    data_of,
    gradients,
    make_rank,
)
from tests.support.losses.batches import REQUESTS, mixed_data, mixed_request
from tests.support.tiny_model import VOCABULARY
from tests.support.trainer_worker import datum, request
from tests.unit.trainer.test_sharing import forward_backward, host, step, trainer_of
from trainer_service.models import compiled_blocks
from trainer_service.models.compiled_blocks import check_compiler

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
    """What torch has compiled belongs to classes of models, which all tests share."""
    torch._dynamo.reset()


@pytest.fixture
def graphs_alone(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def assert_same(compiled, plain, request_name: str) -> None:
    """What both compute of a request, within what another order of additions may change."""
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
    trainer.warm_up(gradients=True)
    return trainer


@pytest.mark.parametrize(("kind", "lora"), [("in threads", None), ("checkpointed", SPEC)])
def test_every_loss_has_the_same_gradients(model, graphs_alone, kind, lora):
    path, settings = model, KINDS[kind]
    plain, compiled = make_rank(path, lora, **settings), compiled_rank(path, lora, **settings)
    with torch.compiler.set_stance("fail_on_recompile"):
        for name in REQUESTS:
            assert_same(compiled, plain, name)


@pytest.mark.parametrize("packing", ["on", pytest.param("off", marks=pytest.mark.nightly)])
def test_neither_new_lengths_nor_new_rows_are_compiled_again(model, graphs_alone, packing):
    trainer = compiled_rank(model, packing=packing, micro_batch_tokens=64)
    trainer.warm_up(gradients=False)
    with torch.compiler.set_stance("fail_on_recompile"):
        batches = [mixed_data(count, seed) for seed, count in enumerate((1, 2, 7, 12))]
        for data in (*batches, [datum([5], weights=[1.0])]):
            message = request(data)
            trainer.forward_backward(batch_of(trainer, message))
            message.forward_only = True
            trainer.forward_backward(batch_of(trainer, message))


def test_runs_that_share_a_model_compute_with_their_own_adapters(model, graphs_alone):
    together = host(model, "a", "b", compile="on")
    alone = {run_id: trainer_of(model, run_id) for run_id in "ab"}
    for number in range(2):
        for run_id, plain in alone.items():
            mine = together.take_turn(run_id)
            found, wanted = (forward_backward(each, data_of(number)) for each in (mine, plain))
            assert dict(found.metrics) == pytest.approx(dict(wanted.metrics), rel=1e-5)
            assert step(mine) == pytest.approx(step(plain), rel=1e-4)


def test_a_trainer_without_a_compiler_does_not_start(monkeypatch):
    def no_compiler():
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", no_compiler)
    with pytest.raises(WorkerStartFailed, match="has none: install"):
        check_compiler("cpu")
    check_compiler("cuda")


def test_what_cannot_be_compiled_is_refused_with_the_model_s_name():
    with (
        pytest.raises(WorkerStartFailed, match="the blocks of Odd cannot be compiled: no way"),
        compiled_blocks.compiling("Odd"),
    ):
        raise InternalTorchDynamoError("no way")
