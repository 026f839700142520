"""One-rank trainers in this process, with or without LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tandem.protocol.worker import LoraSpec, TrainingSpec
from tandem.settings.workers import TrainerSettings
from tandem.v1 import common_pb2, trainer_pb2
from tandem.weights.layout import BaseModelFiles
from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.tiny_model import VOCABULARY
from tests.support.trainer_worker import datum, logprobs_of, request
from tests.support.worker_process import RUN
from trainer_service.backends import World, backend_named
from trainer_service.batches.validation import Batch, BatchLimits, parse, validate
from trainer_service.compute.control_group import ControlGroup
from trainer_service.compute.parallel import ParallelMicroBatches
from trainer_service.compute.trainer import BatchResult, RankTrainer
from trainer_service.service.operations import Operations, encode_output

SPEC = LoraSpec(rank=4, seed=5)
WITHOUT_MLP = SPEC.model_copy(update={"mlp": False})
"""For models with fused experts."""


def spec_of(architecture: str) -> LoraSpec:
    return WITHOUT_MLP if architecture == "qwen3_moe" else SPEC


def make_rank(
    path: Path,
    lora: LoraSpec | None = None,
    *,
    optimizer: str = "adamw",
    states: str = "float32",
    offload: str = "none",
    parallel: int = 0,
    least_tokens: int = 1,
    name: str = "tiny",
    **settings: object,
) -> RankTrainer:
    """Return the only rank of a trainer.

    It computes `parallel` parts of a batch at once (0: no threads), with at least `least_tokens`
    tokens each."""
    threads = None
    if parallel:
        threads = ParallelMicroBatches(count=parallel, threads=1, least_tokens=least_tokens)
    chosen = TrainerSettings(device="cpu", **settings)
    backend = backend_named("fsdp2")(
        model_path=path,
        settings=chosen,
        world=World(rank=0, size=1, device="cpu"),
        training=TrainingSpec(lora=lora, optimizer=optimizer, states=states, offload=offload),
    )
    return RankTrainer(
        backend=backend,
        control=ControlGroup(rank=0, size=1, group=None),
        micro_batch_tokens=chosen.micro_batch_tokens,
        base=BaseModelFiles.of_run(path, backend.training, name=name),
        parallel=threads,
    )


def make(path: Path, lora: LoraSpec | None = SPEC, **more: Any) -> Operations:
    """See `make_rank`."""
    return Operations(make_rank(path, lora, **more))


def compute(trainer: RankTrainer, message: wire.ForwardBackwardRequest) -> BatchResult:
    computed = trainer.forward_backward(batch_of(trainer, message))
    assert computed is not None
    return computed


def output_of(
    trainer: RankTrainer, message: wire.ForwardBackwardRequest
) -> wire.ForwardBackwardOutput:
    batch = batch_of(trainer, message)
    computed = trainer.forward_backward(batch)
    assert computed is not None
    encoded = encode_output(batch, logprobs=computed.logprobs, metrics=computed.metrics)
    return wire.ForwardBackwardOutput.FromString(encoded)


def batch_of(
    trainer: RankTrainer, message: wire.ForwardBackwardRequest, *, definition: bytes = b""
) -> Batch:
    facts = trainer.backend.facts
    limits = BatchLimits(vocabulary=facts.vocabulary, max_length=facts.max_length)
    return validate(parse(message.SerializeToString()), limits=limits, definition=definition)


def gradients(trainer: RankTrainer) -> dict[str, torch.Tensor]:
    """Return the accumulated gradients by parameter."""
    named = parameters_of(trainer).items()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def parameters_of(trainer: RankTrainer) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of the model and of the run's adapters."""
    backend = trainer.backend
    return {**dict(backend._model.named_parameters()), **backend._trainable}


def data_of(seed: int = 0, count: int = 6) -> list[wire.Datum]:
    rng = np.random.default_rng(seed)
    return [
        datum(rng.integers(0, VOCABULARY, length).tolist(), weights=rng.uniform(0, 1, length))
        for length in rng.integers(2, 16, count)
    ]


def forward_backward(
    operations: Operations, data: Sequence[wire.Datum], **more: bool
) -> wire.ForwardBackwardOutput:
    payload = request(data, **more).SerializeToString()
    reply = operations.forward_backward(trainer_pb2.ForwardBackwardRequest(payload=payload))
    assert not reply.HasField("failure"), reply.failure
    return wire.ForwardBackwardOutput.FromString(reply.output)


def logprobs(operations: Operations, data: Sequence[wire.Datum]) -> np.ndarray:
    """Return the logprobs of all targets of all datums."""
    output = forward_backward(operations, data, forward_only=True)
    return np.concatenate([one.reshape(-1) for one in logprobs_of(output)])


def plain(path: Path) -> torch.nn.Module:
    """Load the model with transformers alone."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def logprobs_of_model(model: torch.nn.Module, data: Sequence[wire.Datum]) -> np.ndarray:
    """Return `logprobs` by a plain model, one sequence at a time."""
    found = []
    for one in data:
        tokens = np.frombuffer(one.model_input[0].encoded_text.tokens, "<i4").astype(np.int64)
        targets = np.frombuffer(one.loss_fn_inputs["target_tokens"].dense, "<i8").copy()
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)[None]).logits[0].float()
        chosen = torch.log_softmax(logits, -1).gather(-1, torch.from_numpy(targets)[:, None])
        found.append(chosen[:, 0].numpy())
    return np.concatenate(found)


def step(
    operations: Operations, *, lr: float = 1e-2, clip: float = 0.0, decay: float = 0.01
) -> dict[str, float]:
    reply = optim_step(operations, lr=lr, clip=clip, decay=decay)
    assert not reply.HasField("failure"), reply.failure
    return dict(reply.metrics)


def optim_step(
    operations: Operations, *, lr: float = 1e-2, clip: float = 0.0, decay: float = 0.01
) -> trainer_pb2.OptimStepReply:
    """Return the reply, which may be a failure."""
    adamw = trainer_pb2.AdamWParams(
        learning_rate=lr, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=decay, grad_clip_norm=clip
    )
    return operations.optim_step(trainer_pb2.OptimStepRequest(adamw=adamw))


def train(operations: Operations, steps: int, *, seed: int = 0, lr: float = 1e-2) -> list[float]:
    """Return the losses of some steps with different data."""
    losses = []
    for number in range(seed, seed + steps):
        output = forward_backward(operations, data_of(number))
        losses.append(output.metrics["loss:sum"])
        step(operations, lr=lr)
    return losses


def model_of(operations: Operations) -> torch.nn.Module:
    return operations.trainer.backend._model


def weights(operations: Operations) -> dict[str, torch.Tensor]:
    named = parameters_of(operations.trainer).items()
    return {name: tensor.detach().clone() for name, tensor in named}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Compare bit by bit, sharded or not."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        one, other = (
            each.full_tensor() if hasattr(each, "full_tensor") else each
            for each in (tensor, found[name])
        )
        assert torch.equal(other, one), name


def publish(
    operations: Operations,
    path: Path,
    *,
    handoff: bool = False,
) -> trainer_pb2.PublishReply:
    version = common_pb2.WeightVersion(name=f"{RUN}/{path.name}", path=str(path), run_id=RUN)
    reply = operations.publish(trainer_pb2.PublishRequest(version=version, handoff=handoff))
    assert not reply.HasField("failure"), reply.failure
    return reply


def save(operations: Operations, path: Path) -> trainer_pb2.SaveCheckpointReply:
    reply = operations.save_checkpoint(trainer_pb2.SaveCheckpointRequest(path=str(path)))
    assert not reply.HasField("failure"), reply.failure
    return reply


def load(
    operations: Operations, path: Path, *, optimizer: bool = True
) -> trainer_pb2.LoadCheckpointReply:
    """Return the reply, which may be a failure."""
    return operations.load_checkpoint(
        trainer_pb2.LoadCheckpointRequest(path=str(path), optimizer=optimizer)
    )
