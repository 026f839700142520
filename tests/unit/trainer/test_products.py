"""Products by oneDNN are those of torch's linear layers, whatever padding rows get for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.support.local_trainer import SPEC, compute, data_of, gradients, make_rank
from tests.support.trainer_worker import request
from trainer_service.backends import fsdp2
from trainer_service.models.products import linear, row_length


@pytest.mark.parametrize("shape", [(7, 12), (2, 5, 12)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_linear_layer_and_its_gradients_are_torch_s(shape, bias, frozen):
    generator = torch.Generator().manual_seed(0)

    def leaves():
        generator.manual_seed(0)
        drawn = [torch.randn(size, generator=generator) for size in (shape, (9, 12), (9,))]
        x, weight, offset = (each.requires_grad_() for each in drawn)
        return x, weight.requires_grad_(not frozen), offset if bias else None

    found, wanted = leaves(), leaves()
    mine, torchs = linear(*found), functional.linear(*wanted)
    torch.testing.assert_close(mine, torchs)
    for each in (mine, torchs):
        each.square().sum().backward()
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and one.requires_grad:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-4)
    assert frozen == (found[1].grad is None)


def test_the_operator_is_what_it_says_to_a_compiler():
    a, b = torch.randn(5, 8), torch.randn(3, 8)
    for given in ((a, b), (a, torch.randn(8, 3).t()), (torch.randn(8, 5).t(), b)):
        torch.library.opcheck(torch.ops.tandem.product, given)


def test_rows_have_few_lengths_and_little_padding():
    lengths = [row_length(tokens) for tokens in range(1, 16_385)]
    for tokens, length in enumerate(lengths, start=1):
        assert 0 <= length - tokens < max(16, tokens / 8)
    assert len(set(lengths)) < 70
    assert lengths[15] == 16 and lengths[16] == 32 and lengths[-1] == 16_384


@pytest.mark.parametrize("lora", [None, SPEC])
def test_padding_and_products_change_nothing_but_the_last_digits(model, monkeypatch, lora):
    plain = make_rank(model, lora, micro_batch_tokens=48)
    with monkeypatch.context() as patched:
        patched.setattr(fsdp2, "faster_by_onednn", lambda device: True)
        patched.setattr(fsdp2, "compile_blocks", lambda blocks, *, threads: None)
        changed = make_rank(model, lora, micro_batch_tokens=48, compile="on")
    changed.backend._warm.add(changed.backend._shape)
    assert changed.backend.row_length(41) == 48

    message = request(data_of(3, count=9))
    found, wanted = compute(changed, message), compute(plain, message)

    np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=0, atol=1e-5)
    assert found.metrics == pytest.approx(wanted.metrics, rel=1e-5)
    theirs = gradients(plain)
    for name, gradient in gradients(changed).items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-5)
