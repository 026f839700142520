from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tandem.errors import UnsuitableLora
from tandem.protocol.worker import LoraSpec
from tests.support.architectures import write_model
from tests.support.local_trainer import (
    SPEC,
    WITHOUT_MLP,
    data_of,
    forward_backward,
    gradients,
    logprobs,
    make,
    model_of,
    parameters_of,
    spec_of,
    step,
    train,
    weights,
)
from tests.support.tiny_model import ARCHITECTURES
from trainer_service.lora.adapters import (
    ActiveAdapters,
    Adapter,
    LoraLinear,
    chosen_layers,
    merged,
    target_names,
)
from trainer_service.models.huggingface import empty_model


def only(**kinds: bool) -> LoraSpec:
    return LoraSpec(rank=4, **{"attention": False, "mlp": False, "unembedding": False, **kinds})


def adapters(operations) -> dict[str, torch.Tensor]:
    return {name: t for name, t in weights(operations).items() if ".lora_" in name}


def adapted(layer: nn.Linear, *, rank: int, scale: float) -> tuple[LoraLinear, Adapter]:
    adapter = Adapter.of_layer(layer, rank=rank, scale=scale, seed=3)
    if layer.weight.dtype == torch.float64:
        adapter = replace(
            adapter,
            lora_A=nn.Parameter(adapter.lora_A.detach().double()),
            lora_B=nn.Parameter(adapter.lora_B.detach().double()),
        )
    active = ActiveAdapters()
    lora = LoraLinear(layer, name="it", active=active)
    active.activate({"it": adapter})
    return lora, adapter


# --- Results ---------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_new_adapter_gives_exactly_the_logprobs_of_the_base_model(models, architecture):
    data = data_of()
    base, lora = make(models[architecture], None), make(models[architecture], spec_of(architecture))
    np.testing.assert_array_equal(logprobs(lora, data), logprobs(base, data))


def test_the_gradient_of_a_layer_is_that_of_the_dense_computation():
    torch.manual_seed(0)
    layer = nn.Linear(7, 5).double()
    lora, adapter = adapted(layer, rank=3, scale=0.75)
    with torch.no_grad():
        adapter.lora_B.normal_()
    x = torch.randn(2, 4, 7, dtype=torch.float64, requires_grad=True)
    dense_a, dense_b = (
        p.detach().clone().requires_grad_() for p in (adapter.lora_A, adapter.lora_B)
    )
    dense_x = x.detach().clone().requires_grad_()
    expected = dense_x @ (layer.weight + 0.75 * dense_b @ dense_a).T + layer.bias
    computed = lora(x)
    torch.testing.assert_close(computed, expected)
    pull = torch.randn_like(computed)
    computed.backward(pull)
    expected.backward(pull)
    torch.testing.assert_close(adapter.lora_A.grad, dense_a.grad)
    torch.testing.assert_close(adapter.lora_B.grad, dense_b.grad)
    torch.testing.assert_close(x.grad, dense_x.grad)


def test_the_gradient_of_the_loss_is_the_finite_difference(models):
    trainer = make(models["qwen3"])
    train(trainer, 2)  # B is not zero any more
    data = data_of(9)
    forward_backward(trainer, data)
    held = gradients(trainer.trainer)
    for side in ("q_proj.lora_A", "down_proj.lora_B", "lm_head.lora_A", "lm_head.lora_B"):
        name = next(name for name in held if name.endswith(side))
        direction = held[name] / held[name].norm()
        parameter = parameters_of(trainer.trainer)[name]
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * 1e-3)
            losses.append(forward_backward(trainer, data, forward_only=True).metrics["loss:sum"])
            with torch.no_grad():
                parameter.add_(direction, alpha=-sign * 1e-3)
        difference = (losses[0] - losses[1]) / 2e-3
        assert difference == pytest.approx(float(held[name].norm()), rel=2e-2), name


def test_an_adapter_computes_what_the_merged_weights_compute(models):
    """Also for a tied model: its head becomes a separate weight, its embedding stays."""
    for architecture in ("qwen3", "llama"):
        trainer = make(models[architecture])
        train(trainer, 3)
        expected = logprobs(trainer, data_of(8))
        for name, adapter in trainer.trainer.backend._adapters.by_module.items():
            layer = model_of(trainer).get_submodule(name)
            a, b = adapter.lora_A.detach(), adapter.lora_B.detach()
            whole = merged(layer.weight, a=a, b=b, scale=adapter.scale)
            layer.weight = nn.Parameter(whole, requires_grad=False)
            nn.init.zeros_(adapter.lora_B)
        np.testing.assert_allclose(logprobs(trainer, data_of(8)), expected, atol=1e-5)


def test_alpha_and_rank_scale_the_update():
    for rank, alpha in ((4, 32.0), (8, 32.0), (4, 8.0)):
        layer = nn.Linear(16, 16, bias=False)
        lora, adapter = adapted(layer, rank=rank, scale=alpha / rank)
        nn.init.ones_(adapter.lora_B)
        x = torch.ones(1, 16)
        expected = alpha / rank * adapter.lora_A.sum()
        torch.testing.assert_close(lora(x) - layer(x), expected.expand(1, 16), rtol=1e-4, atol=1e-5)


# --- Trained parameters ----------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [0, 2])
def test_frozen_weights_never_change_and_have_no_gradients(models, parallel):
    trainer = make(models["qwen3"], parallel=parallel)
    before = weights(trainer)
    forward_backward(trainer, data_of())
    assert set(gradients(trainer.trainer)) == set(adapters(trainer))
    step(trainer)
    train(trainer, 2)
    for name, tensor in weights(trainer).items():
        assert torch.equal(tensor, before[name]) == (".lora_" not in name), name


def test_two_threads_train_as_one_does(models):
    one, two = make(models["qwen3"]), make(models["qwen3"], parallel=2)
    assert train(one, 3) == pytest.approx(train(two, 3), rel=1e-4)
    for name, tensor in adapters(one).items():
        torch.testing.assert_close(tensor, adapters(two)[name], rtol=1e-3, atol=1e-4)


def test_clipping_counts_the_trainable_gradients_alone(models):
    trainer = make(models["qwen3"])
    forward_backward(trainer, data_of())
    norms = [gradient.norm() for gradient in gradients(trainer.trainer).values()]
    expected = torch.stack(norms).norm().item()
    assert step(trainer, clip=1e-3)["grad_norm"] == pytest.approx(expected, rel=1e-5)


def test_what_is_trained_is_told(models):
    full = make(models["qwen3"], None).describe()
    assert full.trainable_parameters == full.parameters
    trainer = make(models["qwen3"])
    lora = trainer.describe()
    assert lora.parameters == full.parameters
    assert lora.trainable_parameters == sum(t.numel() for t in adapters(trainer).values())


# --- Which layers ----------------------------------------------------------------------------


def leaves(path: Path, spec: LoraSpec) -> set[str]:
    return {name.rpartition(".")[2] for name in chosen_layers(empty_model(path), spec)}


def test_layers_are_chosen_by_kind(models):
    path = models["qwen3"]
    assert leaves(path, only(attention=True)) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert leaves(path, only(mlp=True)) == {"gate_proj", "up_proj", "down_proj"}
    assert leaves(path, only(unembedding=True)) == {"lm_head"}
    assert len(chosen_layers(empty_model(path), SPEC)) == 3 * 7 + 1
    neox = models["gpt_neox"]
    assert leaves(neox, only(attention=True)) == {"query_key_value", "dense"}
    assert leaves(neox, only(mlp=True)) == {"dense_h_to_4h", "dense_4h_to_h"}


def test_weights_that_adapters_would_pass_by_are_refused_by_name(models, tmp_path):
    experts = empty_model(models["qwen3_moe"])
    layers = r"model\.layers\.0\.mlp\.experts\.gate_up_proj and 5 more weights"
    for spec in (SPEC, only(mlp=True)):
        with pytest.raises(UnsuitableLora, match=f"LoRA on mlp would miss {layers}"):
            chosen_layers(experts, spec)
    with pytest.raises(UnsuitableLora, match="Pass train_mlp=False, or train all"):
        chosen_layers(experts, SPEC)
    assert {name.rpartition(".")[2] for name in chosen_layers(experts, WITHOUT_MLP)} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        "lm_head",
    }
    for architecture in ("qwen2_moe", "deepseek_v3"):  # although a shared expert could have one
        model = empty_model(write_model(tmp_path / architecture, architecture))
        with pytest.raises(UnsuitableLora, match=r"LoRA on mlp would miss .*experts"):
            chosen_layers(model, only(mlp=True))
    gpt2 = empty_model(write_model(tmp_path / "gpt2", "gpt2"))
    with pytest.raises(UnsuitableLora, match=r"attention would miss .*0\.attn\.c_attn\.weight"):
        chosen_layers(gpt2, SPEC)
    with pytest.raises(UnsuitableLora, match="Pass train_attn=False, train_mlp=False, or train"):
        chosen_layers(gpt2, SPEC)
    with pytest.raises(UnsuitableLora, match="Pass train_mlp=False and train_unembed=True, or tr"):
        chosen_layers(gpt2, only(mlp=True))
    assert set(chosen_layers(gpt2, only(unembedding=True))) == {"lm_head"}


def test_norms_with_a_row_for_each_head_are_no_obstacle(tmp_path):
    path = write_model(tmp_path / "cohere", "cohere", use_qk_norm=True)
    assert leaves(path, only(attention=True)) == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_what_is_refused_is_refused_before_weights_are_read(models, monkeypatch):
    monkeypatch.setattr("trainer_service.models.huggingface._copy_shards", pytest.fail)
    with pytest.raises(UnsuitableLora, match="would miss"):
        make(models["qwen3_moe"])


def test_nothing_to_train_is_refused(models):
    with pytest.raises(UnsuitableLora, match="all three are off"):
        make(models["qwen3"], only())


def test_a_rank_beyond_a_layer_is_refused_with_the_largest_one(models):
    with pytest.raises(UnsuitableLora, match=r"rank 17 .*k_proj is \[16, 32\]; .* is 16$"):
        make(models["qwen3"], LoraSpec(rank=17))


def test_the_names_for_peft_mean_the_chosen_layers_alone(models):
    names = [name for name, _ in empty_model(models["qwen3"]).named_modules()]
    some = ["model.layers.0.mlp.up_proj", "model.layers.2.mlp.up_proj"]
    assert target_names(some, all_modules=names) == some
    every = [*some, "model.layers.1.mlp.up_proj"]
    assert target_names(every, all_modules=names) == ["up_proj"]


# --- The seed --------------------------------------------------------------------------------


def test_a_comes_from_the_seed_by_the_layers_name(models):
    whole = adapters(make(models["qwen3"]))
    part = adapters(make(models["qwen3"], SPEC.model_copy(update={"mlp": False})))
    assert part and all(torch.equal(tensor, whole[name]) for name, tensor in part.items())
    other = adapters(make(models["qwen3"], SPEC.model_copy(update={"seed": 6})))
    for name, tensor in whole.items():
        assert torch.equal(tensor, other[name]) == name.endswith("lora_B"), name
    drawn = [tensor for name, tensor in whole.items() if name.endswith("lora_A")]
    assert len({round(float(tensor.sum()), 6) for tensor in drawn}) == len(drawn)


def test_a_is_uniform_within_the_root_of_the_inputs():
    _, adapter = adapted(nn.Linear(400, 300), rank=100, scale=1.0)
    drawn = adapter.lora_A.detach()
    assert float(drawn.abs().max()) <= 400**-0.5
    assert float(drawn.std()) == pytest.approx(400**-0.5 / 3**0.5, rel=0.02)
    assert not adapter.lora_B.any()


def test_no_random_number_is_drawn_while_training(models):
    """A checkpoint therefore needs no generator state."""
    trainer = make(models["qwen3"])
    before = torch.get_rng_state()
    train(trainer, 2)
    assert torch.equal(torch.get_rng_state(), before)
