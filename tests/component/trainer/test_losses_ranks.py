"""Two real ranks agree with one, for every loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tandem.v1 import trainer_pb2
from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.losses.batches import REQUESTS, mixed_data, mixed_request
from tests.support.tiny_model import VOCABULARY, write_tiny_model
from tests.support.trainer_worker import TrainerClient, dense, logprobs_of, trainer_process

pytestmark = pytest.mark.slow

COMPILE_SECONDS = 900.0
COMPILED = [pytest.mark.nightly, pytest.mark.timeout(2 * COMPILE_SECONDS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("ranks"), architecture="llama")


def aged(*steps: int) -> wire.ForwardBackwardRequest:
    """A batch with datums of these steps in turn. Those of step 0 are too old after a step."""
    message = mixed_request("ppo, token mean")
    for number, each in enumerate(message.data):
        step = dense([steps[number % len(steps)]], "<i8")
        each.loss_fn_inputs["weight_step"].CopyFrom(step)
    message.loss_fn_config_v2["max_staleness"].number = 0
    return message


def requests() -> dict[str, wire.ForwardBackwardRequest]:
    """Also batches so small that one rank has no data, and batches with stale datums."""
    return {
        **{name: mixed_request(name) for name in REQUESTS},
        "one pair": mixed_request("dpo", mixed_data(2)),
        "one datum": mixed_request("ppo, token mean", mixed_data(1)),
        "one of three stale": aged(0, 1000, 1000),
        "all stale": aged(0),
    }


Answers = dict[str, tuple[wire.ForwardBackwardOutput, float, dict[str, float]]]


def answers(client: TrainerClient) -> Answers:
    """Outputs, norms of gradients and metrics of a step, with unchanged weights."""
    found = {}
    for name, message in requests().items():
        output = client.output(message)
        step: trainer_pb2.OptimStepReply = client.optim_step(lr=0.0)
        assert not step.HasField("failure"), step.failure
        found[name] = (output, step.metrics["grad_norm"], dict(step.batch_metrics))
    return found


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    with trainer_process(model, tmp_path_factory.mktemp("one")) as client:
        return answers(client)


@pytest.mark.parametrize(
    "less_memory",
    [
        {},
        {
            "logits_bytes": 4 * VOCABULARY * 7,
            "checkpointing": "on",
            "unreduced_gradients_bytes": 1,
        },
        pytest.param({"compile": "on", "checkpointing": "on"}, marks=COMPILED),
    ],
    ids=[
        "plain",
        "chunks, checkpointed blocks, gradients reduced at once",
        "compiled and checkpointed blocks",
    ],
)
def test_two_ranks_compute_what_one_computes(
    model: Path, alone, tmp_path: Path, less_memory
) -> None:
    with trainer_process(
        model, tmp_path / "two", ranks=2, micro_batch_tokens=24, wait=False, **less_memory
    ) as client:
        client.wait_until_serving(COMPILE_SECONDS)
        both = answers(client)
    for name, (output, norm, of_step) in alone.items():
        other, other_norm, other_step = both[name]
        assert other_step == pytest.approx(of_step, rel=1e-4, abs=1e-5), name
        assert dict(other.metrics) == pytest.approx(dict(output.metrics), rel=1e-4, abs=1e-5), name
        assert other_norm == pytest.approx(norm, rel=1e-4), name
        assert (norm > 0) == (name != "all stale"), name
        for one, two in zip(logprobs_of(output), logprobs_of(other), strict=True):
            np.testing.assert_allclose(one, two, atol=1e-5, err_msg=name)
