from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from tests.support.architectures import write_model
from tests.support.local_trainer import make
from tests.support.tiny_model import VOCABULARY, write_tiny_model
from trainer_service.models import packing
from trainer_service.models.huggingface import load_model
from trainer_service.models.packing import (
    bounds_of,
    packed_attention,
    row_inputs,
    runs_of,
    why_not_packed,
)

LENGTHS = [17, 9, 9, 4, 4, 4, 1]


def sequences(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def row_of(parts: list[torch.Tensor]) -> dict[str, object]:
    return {
        "input_ids": torch.cat(parts)[None],
        "use_cache": False,
        **row_inputs(
            np.concatenate([np.arange(len(part)) for part in parts])[None],
            bounds_of([len(part) for part in parts]),
            "cpu",
        ),
    }


def test_runs_are_of_neighbours_of_one_length() -> None:
    assert runs_of(bounds_of(LENGTHS).tolist()) == [(1, 17), (2, 9), (3, 4), (1, 1)]
    assert runs_of(bounds_of([4, 9, 4]).tolist()) == [(1, 4), (1, 9), (1, 4)]


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt_neox", "qwen3_moe"])
def test_a_packed_row_equals_its_sequences_alone(tmp_path: Path, architecture: str) -> None:
    path = write_tiny_model(tmp_path, architecture=architecture)
    model, parts = load_model(path), sequences()
    alone = torch.cat([model(input_ids=part[None]).logits[0] for part in parts])

    assert not why_not_packed(model)
    packed = model(**row_of(parts)).logits[0]

    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_the_sequences_alone(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    model, plain, parts = load_model(path), load_model(path), sequences()
    assert not why_not_packed(model)
    model(**row_of(parts)).logits.log_softmax(-1)[..., 3].sum().backward()
    for part in parts:
        plain(input_ids=part[None]).logits.log_softmax(-1)[..., 3].sum().backward()

    for packed, alone in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(packed.grad, alone.grad, rtol=1e-3, atol=1e-4)


def test_a_sliding_window_ends_within_its_sequence() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=4,
    )
    model, parts = MistralForCausalLM(config).eval(), sequences()
    alone = torch.cat([model(input_ids=part[None]).logits[0] for part in parts])

    assert not why_not_packed(model)
    torch.testing.assert_close(model(**row_of(parts)).logits[0], alone, rtol=1e-4, atol=1e-4)


def test_a_model_that_mixes_neighbouring_tokens_is_left_as_it_is() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4, expand=1
    )
    model = MambaForCausalLM(config).eval()
    assert why_not_packed(model)
    tokens = torch.tensor([[3, 4, 5]])
    assert model(input_ids=tokens).logits.shape == (1, 3, VOCABULARY)


def test_a_model_whose_attention_ends_at_chunks_is_left_as_it_is() -> None:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        intermediate_size_mlp=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=2,
        attention_chunk_size=16,
    )
    model, tokens = Llama4ForCausalLM(config).eval(), torch.arange(40)[None] % VOCABULARY
    before = model(input_ids=tokens).logits

    assert why_not_packed(model)
    torch.testing.assert_close(model(input_ids=tokens).logits, before)


def test_a_model_whose_mask_alone_knows_its_window_is_left_as_it_is(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 1000, "max_window_layers": 2}
    model = load_model(write_model(tmp_path, "qwen2_moe", **window))
    assert set(model.config.layer_types) == {"sliding_attention", "full_attention"}
    assert why_not_packed(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_plain_batch_can_still_be_computed(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    model, plain = load_model(path), load_model(path)
    tokens = torch.stack([torch.arange(6), torch.arange(6, 0, -1)])

    assert not why_not_packed(model)
    torch.testing.assert_close(
        model(input_ids=tokens).logits, plain(input_ids=tokens).logits, rtol=1e-4, atol=1e-5
    )


def heads(seed: int, *, keys: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Query, key and value of one row with 4 heads, in a model's layout."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, sum(LENGTHS), count, 8, generator=generator, dtype=dtype)
        .transpose(1, 2)
        .requires_grad_()
        for count in (4, keys, keys)
    ]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("keys", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_has_the_bits_of_torch_s_attention_of_each_run(window, keys, dtype) -> None:
    row = heads(0, keys=keys, dtype=dtype)
    bounds = torch.from_numpy(bounds_of(LENGTHS))
    packed, _ = packed_attention(None, *row, None, sliding_window=window, bounds=bounds)
    parts = []
    for start, run in zip((0, 17, 35, 47), runs_of(bounds.tolist()), strict=True):
        stop = start + run[0] * run[1]
        views = (each[0, :, start:stop].unflatten(1, run).transpose(0, 1) for each in row)
        attended, _ = packed_attention(None, *views, None, sliding_window=window)
        parts.append(attended.flatten(0, 1))
    alone = torch.cat(parts)[None]
    gradient = torch.randn_like(packed)

    assert torch.equal(packed, alone)
    for found, wanted in zip(
        torch.autograd.grad(packed, row, gradient),
        torch.autograd.grad(alone, row, gradient),
        strict=True,
    ):
        assert torch.equal(found, wanted)


def test_the_operators_are_what_they_say_to_a_compiler() -> None:
    rows = [each.detach()[0].transpose(0, 1) for each in heads(0)]
    bounds = torch.from_numpy(bounds_of(LENGTHS))
    checks = ("test_schema", "test_faketensor")
    operators = torch.ops.tandem
    torch.library.opcheck(
        operators.packed_attention, (*rows, bounds, 9, None, 0), test_utils=checks
    )
    out, sums = operators.packed_attention(*rows, bounds, 9, None, 0)
    torch.library.opcheck(
        operators.packed_attention_backward,
        (torch.ones_like(out), *rows, out, sums, bounds, 9, None, 0),
        test_utils=checks,
    )


def test_values_may_have_fewer_elements_than_keys() -> None:
    query, key, value = heads(0)
    bounds = torch.from_numpy(bounds_of(LENGTHS))
    packed, _ = packed_attention(None, query, key, value[..., :5], None, bounds=bounds)
    wanted, _ = packed_attention(None, query, key, value, None, bounds=bounds)
    torch.testing.assert_close(packed, wanted[..., :5])


def test_a_trainer_tells_whether_it_packs_and_logs_why_it_cannot(model, monkeypatch) -> None:
    with capture_logs() as lines:
        assert make(model, None).describe().packs
        assert not make(model, None, packing="off").describe().packs
    assert "rows_padded" not in {line["event"] for line in lines}

    def no_kernel(*_: object, **__: object) -> None:
        raise NotImplementedError("no kernel takes float32")

    monkeypatch.setattr(packing, "packed_attention", no_kernel)
    with capture_logs() as lines:
        assert not make(model, None).describe().packs
    (line,) = (line for line in lines if line["event"] == "rows_padded")
    assert line["reason"] == "NotImplementedError: no kernel takes float32"
    assert (line["dtype"], line["device"]) == ("float32", "cpu")


class Kernels:
    """Notes the mode of each call of torch's GPU kernel."""

    def __init__(self, *, failing: bool = False) -> None:
        self.failing = failing
        self.modes: list[tuple[bool, ...]] = []

    def _flash_attention_backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *others: object,
        **more: object,
    ) -> tuple[Tensor, ...]:
        self.modes.append(mode())
        if self.failing:
            raise RuntimeError("CUDA error")
        return query, key, value


def mode() -> tuple[bool, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def backward_on_gpu() -> None:
    row = torch.zeros(4, 2, 8)
    sums, bounds = torch.zeros(2, 4), torch.tensor([0, 4], dtype=torch.int32)
    packing._backward_on_gpu(row, row, row, row, row, sums, bounds, 4, None, 0)


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("warned", [None, False, True])
def test_torch_adds_in_one_order_in_the_gpu_s_backward_kernel_and_nowhere_else(
    monkeypatch, failing, warned
) -> None:
    """With any mode before, and even if the kernel fails."""
    kernels = Kernels(failing=failing)
    monkeypatch.setattr(packing, "_KERNELS", kernels)
    torch.use_deterministic_algorithms(warned is not None, warn_only=bool(warned))
    before = mode()
    try:
        with pytest.raises(RuntimeError, match="CUDA error") if failing else nullcontext():
            backward_on_gpu()
        assert kernels.modes == [(True, False, False)]
        assert mode() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_row_of_single_tokens_tells_a_compiler_no_constant() -> None:
    """A length of one would cause another compilation in the middle of a run."""
    bounds = bounds_of([1, 1])
    assert row_inputs(np.zeros(2, np.int64), bounds, "cpu")["longest"] == 2
    assert row_inputs(np.zeros(16, np.int64), bounds_of([9, 7]), "cpu")["longest"] == 9
