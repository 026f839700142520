"""One rank, against plain transformers: padding, micro-batches and outputs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tinker.proto.response_conv import deserialize_forward_backward_output
from transformers import AutoModelForCausalLM

from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.local_trainer import gradients, make_rank, output_of
from tests.support.losses.batches import REQUESTS, mixed_data, mixed_request
from tests.support.tiny_model import ARCHITECTURES
from tests.support.trainer_worker import datum, logprobs_of, request
from trainer_service.compute.trainer import BatchProgress, RankTrainer
from trainer_service.models.huggingface import find_blocks, group_blocks
from trainer_service.optimizers import AdamWSettings
from trainer_service.service.operations import Operations

STEP = AdamWSettings(
    learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=1.0
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_are_those_of_each_sequence_alone_in_plain_transformers(models, architecture):
    plain = AutoModelForCausalLM.from_pretrained(models[architecture], dtype=torch.float32)
    data = mixed_data()
    got = logprobs_of(output_of(make_rank(models[architecture]), request(data, "ppo")))
    for one, logprobs in zip(data, got, strict=True):
        tokens = np.frombuffer(one.model_input[0].encoded_text.tokens, "<i4").astype(np.int64)
        targets = np.frombuffer(one.loss_fn_inputs["target_tokens"].dense, "<i8").tolist()
        with torch.no_grad():
            logits = plain(torch.from_numpy(tokens)[None]).logits[0]
        expected = torch.log_softmax(logits, -1)[range(len(targets)), targets]
        np.testing.assert_allclose(logprobs, expected.numpy(), atol=2e-5)


@pytest.fixture(scope="module")
def whole(models) -> RankTrainer:
    return make_rank(models["qwen3"])


@pytest.fixture(scope="module")
def packed(models) -> RankTrainer:
    return make_rank(models["qwen3"], micro_batch_tokens=24, packing="on")


@pytest.fixture(scope="module")
def padded(models) -> RankTrainer:
    return make_rank(models["qwen3"], micro_batch_tokens=48, packing="off")


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("way", ["packed", "padded"])
def test_any_split_into_micro_batches_gives_the_same_gradients(whole, way, name, request):
    split = request.getfixturevalue(way)
    whole.drop_gradients()
    split.drop_gradients()
    one, many = (output_of(trainer, mixed_request(name)) for trainer in (whole, split))
    assert one.metrics == pytest.approx(dict(many.metrics), rel=1e-4, abs=1e-5)
    for parameter, gradient in gradients(whole).items():
        torch.testing.assert_close(gradient, gradients(split)[parameter], rtol=1e-3, atol=1e-4)


def asked(tokens: list[int]) -> wire.Datum:
    """A datum with prompt tokens only, although all have advantages."""
    ones = [1.0] * len(tokens)
    made = datum(tokens, logprobs=[-4.0] * len(tokens), advantages=ones, weights=ones)
    for spans in (made.model_input_spans, made.loss_fn_input_spans):
        spans.add().prompt_tokens.sequence_id = "asked"
        spans[0].prompt_tokens.length = len(tokens)
    return made


@pytest.mark.parametrize("tokens", [2048, 8], ids=["one micro-batch", "one for each datum"])
def test_a_datum_of_a_prompt_alone_does_not_act(models, tokens):
    trainer = make_rank(models["qwen3"], micro_batch_tokens=tokens, packing="on")
    alone = output_of(trainer, request([asked([4, 5, 6])], "stable_reinforce"))
    assert alone.metrics["active_tokens:sum"] == alone.metrics["loss:sum"] == 0
    assert not any(each.any() for each in gradients(trainer).values())

    sampled = datum(list(range(3, 11)), logprobs=[-4.0] * 8, advantages=[1.0] * 8)
    beside = output_of(trainer, request([sampled, asked([4, 5, 6, 7])], "stable_reinforce"))
    found = gradients(trainer)
    trainer.drop_gradients()
    assert beside.metrics["active_tokens:sum"] == 8
    output_of(trainer, request([sampled], "stable_reinforce"))
    for name, gradient in gradients(trainer).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parallel", [0, 2])
def test_the_tokens_computed_so_far_are_told_while_a_batch_is_computed(
    models, monkeypatch, parallel
):
    trainer = make_rank(models["qwen3"], parallel=parallel, micro_batch_tokens=24)
    seen = []
    count = trainer.progress.count_tokens
    monkeypatch.setattr(
        trainer.progress,
        "count_tokens",
        lambda tokens: (count(tokens), seen.append(trainer.progress.read())),
    )
    data = mixed_data()
    trainer.progress.begin_batch(7)
    output_of(trainer, request(data))
    total = sum(len(one.model_input[0].encoded_text.tokens) // 4 for one in data)
    assert len(seen) > 2
    assert {(reply.seq_id, reply.tokens) for reply in seen} == {(7, total)}
    done = sorted(reply.tokens_done for reply in seen)
    assert 0 < done[0] < total == done[-1]
    trainer.progress.end_batch()
    assert trainer.progress.read().seq_id == 0


def test_a_rank_takes_the_others_to_be_as_far_as_itself():
    progress = BatchProgress()
    progress.begin_batch(3)
    progress.expect(tokens=1000, share=250)
    progress.count_tokens(50)
    assert (progress.read().tokens_done, progress.read().tokens) == (200, 1000)


def test_the_order_of_datums_changes_only_the_order_of_the_answers(models):
    data = mixed_data()
    forward, backward = make_rank(models["qwen3"]), make_rank(models["qwen3"])
    there = output_of(forward, request(data, "cispo"))
    back = output_of(backward, request(data[::-1], "cispo"))
    for one, other in zip(logprobs_of(there), logprobs_of(back)[::-1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    for name, gradient in gradients(forward).items():
        torch.testing.assert_close(gradient, gradients(backward)[name], rtol=1e-3, atol=1e-4)


def test_two_halves_accumulate_to_the_whole(models):
    data = mixed_data()
    whole, halves = make_rank(models["llama"]), make_rank(models["llama"])
    total = output_of(whole, request(data, "importance_sampling")).metrics["loss:sum"]
    parts = [
        output_of(halves, request(part, "importance_sampling")) for part in (data[:6], data[6:])
    ]
    assert sum(part.metrics["loss:sum"] for part in parts) == pytest.approx(total, rel=1e-4)
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(gradient, gradients(halves)[name], rtol=1e-3, atol=1e-4)


def test_a_single_rank_serializes_no_request_for_others(models):
    """The request has no `SerializeToString`, which is slow for large requests."""
    payload = request(mixed_data()).SerializeToString()
    opaque = SimpleNamespace(
        payload=payload, loss_definition=b"", micro_batch_tokens=0, out_of_memory_at=0
    )
    reply = Operations(make_rank(models["qwen3"])).forward_backward(opaque)
    assert not reply.HasField("failure"), reply.failure
    assert reply.tokens > 0


def test_forward_only_leaves_no_gradient(models):
    trainer = make_rank(models["qwen3"])
    output = output_of(trainer, request(mixed_data(), forward_only=True))
    assert len(logprobs_of(output)) == 12
    assert not gradients(trainer)


def test_targets_of_several_widths_come_back_in_their_shapes(models):
    trainer = make_rank(models["qwen3"])
    data = [
        datum([4, 5, 6]),
        datum([4, 5], targets=[[5, 6, 7], [8, 9, 10]], weights=[[1, 0, 0], [0, 1, 1]]),
        datum([7]),
    ]
    output = output_of(trainer, request(data))
    shapes = [logprobs.shape for logprobs in logprobs_of(output)]
    assert shapes == [(3,), (2, 3), (1,)]
    first = output_of(trainer, request([datum([4, 5], targets=[5, 8])]))
    np.testing.assert_allclose(logprobs_of(output)[1][:, 0], logprobs_of(first)[0], atol=1e-5)


def test_the_sdk_reads_the_output(models):
    data = [datum([4, 5, 6]), datum([4, 5], targets=[[5, 6], [8, 9]]), datum([7])]
    output = output_of(make_rank(models["qwen3"]), request(data))
    read = deserialize_forward_backward_output(output.SerializeToString())
    assert [list(one["logprobs"].shape) for one in read.loss_fn_outputs] == [[3], [2, 2], [1]]
    assert read.metrics["loss:sum"] == pytest.approx(output.metrics["loss:sum"])


def test_a_step_is_that_of_torch(models):
    """Loss, clipping and AdamW, against a plain loop."""

    data = mixed_data(4)
    trainer = make_rank(models["qwen3"])
    plain = AutoModelForCausalLM.from_pretrained(models["qwen3"], dtype=torch.float32)
    adamw = torch.optim.AdamW(
        plain.parameters(), lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1
    )
    for _ in range(3):
        output_of(trainer, request(data))
        metrics = trainer.optim_step(STEP)
        adamw.zero_grad()
        for one in data:
            tokens = np.frombuffer(one.model_input[0].encoded_text.tokens, "<i4").astype(np.int64)
            targets = np.frombuffer(one.loss_fn_inputs["target_tokens"].dense, "<i8").copy()
            weights = np.frombuffer(one.loss_fn_inputs["weights"].dense, "<f4").copy()
            logits = plain(torch.from_numpy(tokens)[None]).logits[0]
            chosen = torch.log_softmax(logits, -1)[range(len(targets)), targets]
            (-(torch.from_numpy(weights) * chosen).sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adamw.step()
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    for name, tensor in plain.named_parameters():
        torch.testing.assert_close(trainer.backend.parameters()[name], tensor, rtol=1e-3, atol=2e-4)


def test_zero_advantages_leave_the_weights_exactly_as_they_were(models):
    trainer = make_rank(models["qwen3"])
    before = {name: tensor.clone() for name, tensor in trainer.backend.parameters().items()}
    zero = datum([5, 6, 7], logprobs=[-1.0] * 3, advantages=[0.0] * 3)
    output_of(trainer, request([zero], "importance_sampling"))
    trainer.optim_step(replace(STEP, weight_decay=0.0))
    for name, tensor in trainer.backend.parameters().items():
        assert torch.equal(tensor, before[name]), name


def test_blocks_are_found_and_grouped_by_size(models):
    for architecture in ARCHITECTURES:
        model = AutoModelForCausalLM.from_pretrained(models[architecture])
        blocks = find_blocks(model)
        assert len(blocks) == 3
        size = sum(parameter.numel() for parameter in blocks[0].parameters())
        assert group_blocks(blocks, minimum=10 * size) == []
        assert [len(g) for g in group_blocks(blocks, minimum=size + 1)] == [2]
        assert [len(g) for g in group_blocks(blocks, minimum=size)] == [1, 1, 1]
