from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from tandem.errors import UnsupportedByBackend, WorkerStartFailed
from tandem.protocol.worker import Layout, TrainingSpec, WorkerSpec
from tandem.settings.workers import TrainerSettings
from tandem.weights import model_config
from tandem.weights.model_config import why_undivided
from tests.support.architectures import CONFIGURATIONS
from trainer_service.backends.fsdp2 import Fsdp2Backend
from trainer_service.compute.process_group import check_capabilities
from trainer_service.models.tensor_parallel import check_divisible, shapes_on_a_rank

TOGETHER = TrainingSpec(layout=Layout(tensor_parallel=2))


def configuration(architecture: str, **changes: object) -> PreTrainedConfig:
    return AutoConfig.for_model(architecture, **{**CONFIGURATIONS.get(architecture, {}), **changes})


def empty(architecture: str, **changes: object) -> torch.nn.Module:
    return empty_of(configuration(architecture, **changes))


def empty_of(config: PreTrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("gpt2", {}, "transformers has no plan for it"),
        ("minicpm3", {}, "its plan has mla_kv_a_proj, of .*, which trainers do not know"),
        ("qwen3_moe", {"num_experts": 5}, "experts.gate_up_proj has 5 experts"),
        ("llama4_text", {}, "is of several experts, in a layer that trainers do not know"),
        ("gpt_oss", {}, "self_attn.sinks is in no layer of its own"),
        ("qwen3", {"num_key_value_heads": 1}, "its 1 heads of keys and values are not a multiple"),
        ("llama", {"intermediate_size": 129}, "gate_proj.weight has 129 rows"),
        ("gpt_neox", {"tie_word_embeddings": True}, "and other layers have it, too"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_by_what_cannot(
    architecture, changes, reason
) -> None:
    with pytest.raises(WorkerStartFailed, match=f"among 2 ranks .tandem.tensor_para.*{reason}"):
        check_divisible(empty(architecture, **changes), 2)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_the_gateway_refuses_by_the_configuration_alone_what_the_trainer_refuses() -> None:
    cases: list[tuple[str, dict[str, int]]] = [(kind, {}) for kind in CONFIGURATIONS]
    cases += [
        (kind, {} if kind == "gpt_neo" else {"num_hidden_layers": 1})
        for kind in model_config._WITHOUT_PLAN | model_config._SINKS
        if kind not in CONFIGURATIONS
    ]
    cases += [
        (kind, {name: size})
        for kind in model_config._DIVIDED
        for name, size in (("intermediate_size", 129), ("vocab_size", 257))
    ]
    cases += [("llama", {"num_key_value_heads": 1}), ("llama", {"num_attention_heads": 1})]
    cases += [("mixtral", {"num_local_experts": 5})]
    for architecture, changes in cases:
        config = configuration(architecture, **changes)
        model = empty_of(config)
        if why_undivided(config.to_dict(), 2):
            with pytest.raises(WorkerStartFailed):
                check_divisible(model, 2)
        else:
            check_divisible(model, 2)


def test_a_rank_has_half_of_each_matrix_and_all_norms() -> None:
    whole = empty("qwen3")
    shapes = shapes_on_a_rank(whole, 2)
    assert "lm_head.weight" not in shapes, "a tied weight is one"
    for name, parameter in whole.named_parameters():
        parts = 1 if parameter.ndim == 1 else 2
        assert math.prod(shapes[name]) == parameter.numel() // parts


def check(training: TrainingSpec) -> None:
    spec = WorkerSpec(
        worker_id="w",
        kind="trainer",
        secret="",
        model_name="m",
        model_path="m",
        session_id="s",
        training=training,
        trainer=TrainerSettings(ranks=2),
    )
    check_capabilities(spec, "fsdp2")


@pytest.mark.parametrize(
    "training",
    [
        TrainingSpec(layout=Layout(replicas=2)),
        TrainingSpec(layout=Layout(tensor_parallel=2)),
        TrainingSpec(offload="weights"),
    ],
)
def test_a_backend_that_knows_no_layouts_is_refused_before_the_start(monkeypatch, training) -> None:
    monkeypatch.setattr(Fsdp2Backend, "capabilities", frozenset())
    with pytest.raises(UnsupportedByBackend, match="Fsdp2Backend cannot copy a model, divide"):
        check(training)


@pytest.mark.parametrize("training", [TrainingSpec(), TrainingSpec(offload="moments")])
def test_a_backend_without_capabilities_starts_a_plain_run(monkeypatch, training) -> None:
    monkeypatch.setattr(Fsdp2Backend, "capabilities", frozenset())
    check(training)
