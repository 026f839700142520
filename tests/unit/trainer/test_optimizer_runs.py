from __future__ import annotations

from pathlib import Path

import pytest

from tandem.protocol.worker import LoraSpec
from tandem.v1 import trainer_pb2
from tests.support import local_trainer as lora
from trainer_service.service.operations import Operations


def step(operations: Operations) -> trainer_pb2.OptimStepReply:
    params = trainer_pb2.DiMuonParams(learning_rate=1e-3, beta1=0.9, grad_clip_norm=1.0)
    return operations.optim_step(trainer_pb2.OptimStepRequest(dimuon=params))


def train(operations: Operations, *seeds: int) -> list[float]:
    losses = []
    for seed in seeds:
        output = lora.forward_backward(operations, lora.data_of(seed))
        losses.append(output.metrics["loss:sum"])
        reply = step(operations)
        assert not reply.HasField("failure"), reply.failure
    return losses


@pytest.mark.parametrize("spec", [None, LoraSpec(rank=4, seed=5)], ids=["full", "lora"])
def test_muon_has_the_hidden_matrices_and_adamw_the_rest(
    model: Path, spec: LoraSpec | None
) -> None:
    operations = lora.make(model, spec, optimizer="dimuon")
    train(operations, 0)
    backend = operations.trainer.backend
    state = backend.optimizer.state(create=False)
    kinds = {name.rpartition(".")[0]: name.rpartition(".")[2] for name in state}
    named = lora.parameters_of(operations.trainer)
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    assert kinds.keys() == trained.keys()
    for name, parameter in trained.items():
        outer = "embed" in name or "lm_head" in name
        is_muon = kinds[name] == "momentum_buffer"
        assert is_muon == (parameter.ndim == 2 and not outer), name
    assert "momentum_buffer" in kinds.values()


def test_a_step_with_adams_settings_is_refused_and_keeps_the_gradients(model: Path) -> None:
    operations = lora.make(model, None, optimizer="dimuon")
    lora.forward_backward(operations, lora.data_of(0))
    adam = trainer_pb2.AdamWParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-12)
    refused = operations.optim_step(trainer_pb2.OptimStepRequest(adamw=adam))
    assert refused.failure.type == "optimizer_setting"
    assert "DimuonParams" in refused.failure.message
    assert step(operations).step == 1
