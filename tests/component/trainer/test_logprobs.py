"""Logprobs in chunks and checkpointed blocks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    RobertaConfig,
)

from tests.support.local_trainer import batch_of, gradients, make_rank, spec_of
from tests.support.losses.batches import REQUESTS, mixed_request
from tests.support.losses.cases import REQUESTS as LOSS_REQUESTS
from tests.support.losses.cases import Data, gradient, random_data, request_id, settings_of
from tests.support.losses.definitions import DEFINITIONS
from tests.support.tiny_model import ARCHITECTURES, VOCABULARY
from trainer_service.losses import LOSSES
from trainer_service.models.huggingface import load_model
from trainer_service.models.logprobs import ChunkedLogprobs, comes_apart, divide

ROWS = 5
IN_CHUNKS = {"logits_bytes": 4 * VOCABULARY * ROWS, "micro_batch_tokens": 256}
"""Each test's only micro-batch has fewer tokens."""


EVERY = (*REQUESTS, *DEFINITIONS)


def mixed_batch(trainer, request):
    definition = DEFINITIONS.get(request, b"")
    return batch_of(trainer, mixed_request(request), definition=definition)


def compute(trainer, request):
    trainer.drop_gradients()
    computed = trainer.forward_backward(mixed_batch(trainer, request))
    return computed, gradients(trainer)


@pytest.mark.parametrize("request_name", EVERY)
@pytest.mark.parametrize("packing", ["on", "off"])
def test_chunks_change_neither_logprobs_nor_gradients_of_any_loss(model, request_name, packing):
    whole = compute(make_rank(model, packing=packing), request_name)
    chunked = compute(make_rank(model, packing=packing, **IN_CHUNKS), request_name)
    assert_same(chunked, whole)


def assert_same(found, wanted):
    torch.testing.assert_close(
        torch.from_numpy(found[0].logprobs), torch.from_numpy(wanted[0].logprobs), rtol=0, atol=1e-5
    )
    assert found[0].metrics == pytest.approx(wanted[0].metrics, rel=1e-4, abs=1e-5)
    assert found[1].keys() == wanted[1].keys()
    largest = max(float(each.abs().max()) for each in wanted[1].values())
    for name, each in wanted[1].items():
        torch.testing.assert_close(found[1][name], each, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_chunks_change_nothing_in_any_architecture(models, architecture, adapted):
    path, lora = models[architecture], spec_of(architecture) if adapted else None
    for request in ("ppo, token mean", "gspo"):
        whole = compute(make_rank(path, lora), request)
        chunked = compute(make_rank(path, lora, **IN_CHUNKS), request)
        assert_same(chunked, whole)


def test_chunks_in_two_threads_change_nothing(model):
    whole = compute(make_rank(model, parallel=2), "ppo, token mean")
    chunked = compute(make_rank(model, parallel=2, **IN_CHUNKS), "ppo, token mean")
    assert_same(chunked, whole)


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_checkpointed_blocks_give_the_same_bits(models, architecture, adapted):
    path, lora = models[architecture], spec_of(architecture) if adapted else None
    plain, plain_gradients = compute(make_rank(path, lora), "ppo, token mean")
    again, again_gradients = compute(make_rank(path, lora, checkpointing="on"), "ppo, token mean")

    assert again.logprobs.tobytes() == plain.logprobs.tobytes()
    for name, each in plain_gradients.items():
        assert torch.equal(again_gradients[name], each), name


@pytest.fixture(scope="module")
def kept_and_made_again(model):
    """A trainer that keeps activations, and one that recomputes them."""
    return make_rank(model), make_rank(model, checkpointing="on")


@pytest.mark.parametrize("request_name", EVERY)
def test_checkpointed_blocks_give_the_same_bits_of_any_loss(kept_and_made_again, request_name):
    (plain, expected), (again, found) = (
        compute(trainer, request_name) for trainer in kept_and_made_again
    )
    assert again.metrics == plain.metrics
    assert again.logprobs.tobytes() == plain.logprobs.tobytes()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())


@pytest.fixture(scope="module")
def in_float64(models):
    """A plain trainer and trainers that save memory. GPT-NeoX computes in the model's type, while
    other models have norms in float32."""
    ways = ({}, IN_CHUNKS, {"checkpointing": "on"}, {**IN_CHUNKS, "checkpointing": "on"})
    trainers = [make_rank(models["gpt_neox"], packing="off", **way) for way in ways]
    for trainer in trainers:
        trainer.backend._model.double()
    return trainers


def compute_exactly(trainer, request):
    """Like `compute`, without the trainer's rounding to float32."""
    trainer.drop_gradients()
    batch = mixed_batch(trainer, request)
    whole = tuple(range(len(batch.lengths)))
    computed = trainer.backend.forward_backward(batch, (whole,), done=lambda tokens: None)
    return computed, gradients(trainer)


@pytest.mark.parametrize("request_name", EVERY)
def test_in_float64_chunks_and_checkpointed_blocks_are_exact_for_any_loss(in_float64, request_name):
    plain, *sparing = in_float64
    computed, expected = compute_exactly(plain, request_name)
    largest = max(float(each.abs().max()) for each in expected.values())
    assert largest > 0
    for trainer in sparing:
        again, found = compute_exactly(trainer, request_name)
        np.testing.assert_allclose(again.sums, computed.sums, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(again.logprobs, computed.logprobs, rtol=1e-12)
        assert found.keys() == expected.keys()
        for name, each in expected.items():
            assert found[name].dtype == torch.float64
            torch.testing.assert_close(found[name], each, rtol=1e-12, atol=1e-12 * largest)


class LargestOf(TorchDispatchMode):
    """Records the most rows of logits in one tensor."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else [found]:
            if isinstance(each, torch.Tensor) and each.dim() > 1 and each.shape[-1] == VOCABULARY:
                self.rows = max(self.rows, each.numel() // VOCABULARY)
        return found


@pytest.mark.parametrize("request_name", REQUESTS)
def test_no_tensor_has_the_logits_of_more_rows_than_a_chunk(models, request_name):
    rows = 40  # more than the hidden size: the head's weight also appears transposed
    trainer = make_rank(models["llama"], logits_bytes=4 * VOCABULARY * rows)
    batch = batch_of(trainer, mixed_request(request_name))
    with LargestOf() as largest:
        trainer.forward_backward(batch)
        trainer.forward_backward(dataclasses.replace(batch, forward_only=True))
    assert largest.rows == rows


@pytest.mark.parametrize(("name", "config"), LOSS_REQUESTS, ids=request_id)
def test_a_loss_by_entry_has_gradients_that_know_nothing_of_other_entries(name, config):
    loss, data = LOSSES[name], random_data()
    before = gradient(loss, data, config)
    others = torch.zeros_like(before)
    for place in range(len(before)):
        moved = data.logprobs.clone()
        moved[place] = 0.0
        change = gradient(loss, Data(moved, data.inputs, data.sizes), config) - before
        change[place] = 0.0
        others = torch.maximum(others, change.abs())

    by_entry = bool((others < 1e-12).all())
    if loss.by_entry(settings_of(loss, config)):
        assert by_entry
    elif config.get("correction") in (None, "none"):
        assert not by_entry, "it could be computed with one pass over the head"


def test_in_float64_chunks_are_exact():
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 30, bias=True).double()
    hidden = torch.randn(23, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 30, (23, 2))
    weights = torch.randn(46, dtype=torch.float64)
    whole, chunked = (
        ChunkedLogprobs(head, lambda: list(head.parameters()), rows=rows) for rows in (100, 4)
    )
    leaves = [hidden, *head.parameters()]

    plain = whole(hidden, targets).reshape(-1)
    wanted = torch.autograd.grad((plain * weights).sum(), leaves)
    again = chunked(hidden, targets).reshape(-1)
    made_again = torch.autograd.grad((again * weights).sum(), leaves)
    select = torch.arange(0, 46, 3)
    at_once, carrier = chunked.with_gradients(
        hidden, targets, select=select, gradient_of=lambda logprobs: weights[select]
    )
    made_at_once = torch.autograd.grad(carrier, leaves)
    some = torch.autograd.grad((whole(hidden, targets).reshape(-1) * weights)[select].sum(), leaves)

    torch.testing.assert_close(again, plain, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(at_once, plain[select], rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(made_again, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(made_at_once, some, rtol=1e-12, atol=1e-12)


COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**COMMON, final_logit_softcapping=3.0),
        CohereConfig(**COMMON, logit_scale=0.3),
        GraniteConfig(**COMMON, logits_scaling=5.0),
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64),
    ],
    ids=lambda config: config.model_type,
)
def test_what_a_model_does_with_its_logits_is_done_to_chunks(tmp_path, config):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    plain, model = load_model(tmp_path), load_model(tmp_path)
    tokens = torch.randint(0, VOCABULARY, (1, 9))

    assert comes_apart(model)
    logits_of, tail = divide(model)

    assert list(tail) == ["lm_head"]
    with torch.no_grad():
        found = logits_of(model(input_ids=tokens, use_cache=False)[0])
        torch.testing.assert_close(found, plain(tokens).logits[0])


def test_all_that_makes_logits_of_hidden_states_has_gradients(tmp_path):
    config = RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        is_decoder=True,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    whole, chunked = (
        compute(make_rank(tmp_path, packing="off", **more), "gspo") for more in ({}, IN_CHUNKS)
    )
    assert_same(chunked, whole)
    assert chunked[1]["lm_head.dense.weight"].abs().max() > 0


def test_a_model_that_does_not_come_apart_is_trained_all_the_same(model, monkeypatch):
    whole = compute(make_rank(model), "ppo, token mean")
    monkeypatch.setattr("trainer_service.models.logprobs._agree", lambda *parts: False)
    undivided = compute(make_rank(model, **IN_CHUNKS), "ppo, token mean")
    assert_same(undivided, whole)
