"""One rank fails, while others would wait for minutes in a collective."""

from __future__ import annotations

import os
import re

import grpc
import psutil
import pytest
import torch

from tandem.agent.worker_process import group_members
from tandem.protocol.worker import DEFECT_METADATA_KEY, Layout, TrainingSpec
from tests.support import failing_ranks
from tests.support.architectures import write_model
from tests.support.custom_losses import request_body, traced
from tests.support.trainer_worker import TrainerClient, datum, request, trainer_process
from tests.support.worker_process import CALL_SECONDS

pytestmark = pytest.mark.slow

BATCH = request([datum([7, 8, 9], weights=[1.0] * 3), datum([4, 5, 6], weights=[1.0] * 3)])
PATIENT = 20 * CALL_SECONDS
"""Of a collective, far longer than a test's call."""
IN_FORWARD = (
    r"rank {rank} failed: AssertionError \(traceback: .*failing_ranks.py:\d+ forward_backward, "
    r"failing_ranks.py:\d+ _look_up\), caused by KeyError: 'of the datum' "
    r"\(traceback: failing_ranks.py:\d+ _look_up\)"
)
IN_STEP = (
    r"rank {rank} failed: ZeroDivisionError: no gradients in 'config.json' "
    r"\(traceback: .*trainer.py:\d+ optim_step, failing_ranks.py:\d+ _divide\)"
)


@pytest.fixture
def backends(tmp_path, monkeypatch):
    failing_ranks.install(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")


def ends_with(client: TrainerClient, error: grpc.RpcError, sentence: str) -> None:
    assert error.code() is grpc.StatusCode.ABORTED
    assert re.fullmatch(sentence, error.details())
    assert DEFECT_METADATA_KEY in dict(error.trailing_metadata())
    report = client.next_report()
    assert (report.error_type, report.error) == ("worker_died", error.details())
    assert client.process.wait(timeout=CALL_SECONDS) == 1
    assert group_members(client.process.pid) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_in_the_forward_pass_of_a_rank_is_told_with_its_traceback(
    models, tmp_path, backends, ranks
):
    settings = {"ranks": ranks, "backend": "fails_in_forward", "collective_timeout": PATIENT}
    with trainer_process(models["qwen3"], tmp_path, **settings) as client:
        with pytest.raises(grpc.RpcError) as caught:
            client.forward_backward(BATCH)
        ends_with(client, caught.value, IN_FORWARD.format(rank=ranks - 1))


def test_an_error_in_the_optimizer_of_a_rank_is_told_with_its_traceback(models, tmp_path, backends):
    settings = {"ranks": 2, "backend": "fails_in_step", "collective_timeout": PATIENT}
    with trainer_process(models["qwen3"], tmp_path, **settings) as client:
        client.output(BATCH)
        with pytest.raises(grpc.RpcError) as caught:
            client.optim_step()
        ends_with(client, caught.value, IN_STEP.format(rank=1))


def squares(logprobs: torch.Tensor):
    return logprobs.repeat(2**20).square().mean(), {}


@pytest.mark.parametrize("together", [1, 2], ids=["own shares", "divided matrices"])
def test_a_custom_loss_that_fails_on_a_rank_alone_fails_the_request(tmp_path, together):
    model = write_model(tmp_path, "qwen3")
    training = TrainingSpec(layout=Layout(tensor_parallel=together))
    body = request_body(traced(squares, logprobs=1))
    batch = request([datum([7, 8, 9]), datum([4, 5, 6])], "custom")
    with trainer_process(model, tmp_path, ranks=2, training=training) as client:
        assert not client.forward_backward(batch, loss_definition=body).HasField("failure")
        process = process_of_losses(client)
        most = process.memory_info().vms
        process.rlimit(psutil.RLIMIT_AS, (most, most))
        failure = client.forward_backward(batch, loss_definition=body).failure
        assert failure.type == "custom_loss_failed", failure
        assert "more memory" in failure.message, failure
        refused = client.optim_step().failure
        assert refused.type == "gradients_incomplete", refused


def process_of_losses(client: TrainerClient) -> psutil.Process:
    """Rank 1's process for custom losses."""
    ranks = psutil.Process(client.process.pid).children()
    [found] = [
        child
        for each in ranks
        for child in each.children()
        if "tandem.custom_losses.process" in child.cmdline()
    ]
    return found
