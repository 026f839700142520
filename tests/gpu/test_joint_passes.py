from __future__ import annotations

import numpy as np
import pytest
import torch

from tandem.protocol.worker import LoraSpec, TrainingSpec
from tests.support.devices import DEVICES, operations_on_gpu
from tests.support.local_trainer import batch_of, gradients, make_rank
from tests.support.tiny_model import VOCABULARY, write_tiny_model
from tests.support.trainer_worker import datum, request
from trainer_service.batches.validation import Batch
from trainer_service.compute.joint import forward_backward_together
from trainer_service.compute.trainer import RankTrainer

RUNS = 8
TOKENS = 48


def batch(run: RankTrainer, seed: int) -> Batch:
    random = np.random.default_rng(seed)
    data = [
        datum(random.integers(3, VOCABULARY, TOKENS).tolist(), weights=np.ones(TOKENS))
        for _ in range(4)
    ]
    return batch_of(run, request(data))


def assert_joint_as_alone(first: RankTrainer) -> None:
    others = [
        first.share(TrainingSpec(lora=LoraSpec(rank=8, seed=number)), run=number)
        for number in range(1, RUNS)
    ]
    runs = [first, *others]
    batches = [batch(run, seed) for seed, run in enumerate(runs)]
    expected, logprobs = [], []
    for run, given in zip(runs, batches, strict=True):
        run.backend.activate()
        computed = run.forward_backward(given)
        assert computed is not None
        logprobs.append(computed.logprobs)
        expected.append(of_run(run))
        run.drop_gradients()
    together = [run.joint_batch(given) for run, given in zip(runs, batches, strict=True)]
    joint = [each for each in together if each is not None]
    assert len(joint) == RUNS, "a batch needs a pass of its own"
    results = forward_backward_together(joint)
    assert results is not None
    for run, mine, result, alone, theirs in zip(
        runs, joint, results, logprobs, expected, strict=True
    ):
        found = run.combined(mine.batch, mine.plan, result).logprobs
        assert np.abs(found - alone).mean() < 0.02
        run.backend.activate()
        ours = of_run(run)
        assert ours.keys() == theirs.keys()
        norm = sum(float(each.square().sum()) for each in theirs.values()) ** 0.5
        off = sum(float((ours[n] - each).square().sum()) for n, each in theirs.items()) ** 0.5
        assert norm > 0 and off < 0.02 * norm


def of_run(run: RankTrainer) -> dict[str, torch.Tensor]:
    return {name: each.float().cpu() for name, each in gradients(run).items()}


@pytest.mark.parametrize("device", DEVICES)
def test_a_joint_pass_in_bfloat16_computes_what_each_run_computes_alone(tmp_path, device):
    """Up to rounding: a larger product of matrices may add in another order."""
    lora = LoraSpec(rank=8, seed=0)
    if device == "cpu":
        model = write_tiny_model(tmp_path / "model", head_dim=64, max_length=512)
        assert_joint_as_alone(make_rank(model, lora, dtype="bfloat16"))
        return
    with operations_on_gpu(
        tmp_path, dtype="bfloat16", training=TrainingSpec(lora=lora)
    ) as operations:
        assert_joint_as_alone(operations.trainer)
