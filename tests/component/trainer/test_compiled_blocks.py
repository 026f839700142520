"""Compiled blocks as machine code, for `make nightly`: a minute for each kind."""

from __future__ import annotations

import pytest
import torch

from tests.support.local_trainer import SPEC, compute, gradients, make_rank
from tests.support.losses.batches import REQUESTS, mixed_data
from tests.support.trainer_worker import request
from tests.unit.trainer.test_compiled_blocks import KINDS, assert_same, compiled_rank

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]


@pytest.fixture(autouse=True)
def anew():
    """Compiled code belongs to the models' classes, which tests share. Its tensors without data
    break tests that count tensors."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora", [None, SPEC], ids=["full", "lora"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt_neox"])
def test_every_loss_has_the_same_gradients(models, kind, lora, architecture):
    path, settings = models[architecture], KINDS[kind]
    plain, compiled = make_rank(path, lora, **settings), compiled_rank(path, lora, **settings)
    with torch.compiler.set_stance("fail_on_recompile"):
        for name in REQUESTS:
            assert_same(compiled, plain, name)


def test_the_bits_are_the_same_whichever_batch_comes_first(model):
    messages = [request(mixed_data(count, count)) for count in (3, 12)]
    found = []
    for order in (messages, messages[::-1]):
        torch._dynamo.reset()
        trainer = compiled_rank(model)
        for message in order:
            compute(trainer, message)
            found.append((message is messages[0], gradients(trainer)))
            trainer.drop_gradients()
    for of_first in (True, False):
        one, other = (each for is_first, each in found if is_first is of_first)
        assert all(torch.equal(one[name], other[name]) for name in one)
