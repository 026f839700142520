"""Real trainer processes: order, refusals, and death."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tandem.agent.worker_process import group_members
from tandem.v1 import trainer_pb2
from tandem.weights import open_version
from tests.support.tiny_model import VOCABULARY
from tests.support.trainer_worker import TrainerClient, datum, logprobs_of, request, trainer_process
from tests.support.waiting import wait_until
from tests.support.worker_process import CALL_SECONDS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one(models, tmp_path_factory):
    with trainer_process(models["qwen3"], tmp_path_factory.mktemp("data")) as client:
        yield client


@pytest.fixture(scope="module")
def two(models, tmp_path_factory):
    """Two ranks, one FSDP group for each block, many small micro-batches."""
    with trainer_process(
        models["qwen3"],
        tmp_path_factory.mktemp("data"),
        ranks=2,
        shard_group_parameters=1,
        micro_batch_tokens=40,
    ) as client:
        yield client


def mixed_data(count: int = 9, seed: int = 0):
    rng = np.random.default_rng(seed)
    return [
        datum(
            rng.integers(0, VOCABULARY, length).tolist(),
            logprobs=rng.normal(-4, 0.5, length),
            advantages=rng.normal(0, 1, length),
            weights=rng.uniform(0, 1, length),
        )
        for length in rng.integers(1, 20, count)
    ]


def published(client: TrainerClient, data_dir: Path) -> dict[str, torch.Tensor]:
    reply, path = client.publish(data_dir)
    assert not reply.HasField("failure"), reply.failure
    open_version(path, name=reply.version.name)
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo"])
def test_two_ranks_compute_what_one_rank_computes(one, two, tmp_path, loss):
    results = []
    for client in (one, two):
        output = client.output(request(mixed_data(), loss))
        step = client.optim_step(clip=1.0)
        assert not step.HasField("failure"), step.failure
        results.append((output, step, published(client, tmp_path)))
    (single, step, alone), (double, other, shared) = results
    assert single.metrics["loss:sum"] == pytest.approx(double.metrics["loss:sum"], rel=1e-4)
    assert dict(single.metrics).keys() == dict(double.metrics).keys()
    for a, b in zip(logprobs_of(single), logprobs_of(double), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert step.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=1e-3)
    assert alone.keys() == shared.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(tensor, shared[name], rtol=1e-3, atol=1e-4)


def test_forward_after_a_step_sees_the_new_weights_on_two_ranks(two):
    message = request(mixed_data(), forward_only=True)
    before = two.output(message).metrics["loss:sum"]
    two.output(request(mixed_data()))
    two.optim_step(lr=1e-2)
    after = two.output(message).metrics["loss:sum"]
    assert after < before


@pytest.mark.parametrize("ranks", ["one", "two"])
def test_a_version_loads_in_plain_transformers_and_gives_the_canary(ranks, tmp_path, request_of):
    client = request_of(ranks)
    reply, path = client.publish(tmp_path)
    manifest = open_version(path, name=reply.version.name)
    assert manifest.canary is not None
    model = AutoModelForCausalLM.from_pretrained(path)
    tokens = torch.tensor(manifest.canary.tokens)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens[None]).logits[0].float(), -1)
    expected = logprobs[range(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(manifest.canary.logprobs, expected.numpy(), atol=1e-4)
    assert "lm_head.weight" not in {n for f in path.glob("*.safetensors") for n in load_file(f)}
    assert not list(path.parent.glob(".partial*"))


@pytest.fixture
def request_of(request):
    return request.getfixturevalue


def test_fused_experts_are_published_as_their_files_were(models, tmp_path):
    with trainer_process(models["qwen3_moe"], tmp_path, ranks=2) as client:
        tensors = published(client, tmp_path)
    original = load_file(models["qwen3_moe"] / "model.safetensors")
    assert tensors.keys() == original.keys()
    for name, tensor in original.items():
        torch.testing.assert_close(tensors[name], tensor)


def test_a_refused_batch_spoils_the_step_and_the_next_one_is_free(one, tmp_path):
    before = published(one, tmp_path)
    one.output(request(mixed_data()))
    refused = one.forward_backward(request([datum([VOCABULARY])]))
    assert refused.failure.type == "token_out_of_vocabulary"
    step = one.optim_step()
    assert step.failure.type == "gradients_incomplete"
    assert f"token {VOCABULARY}" in step.failure.message
    assert one.optim_step().failure.type == "no_gradients"
    after = published(one, tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_refused_forward_only_spoils_nothing(one):
    one.output(request(mixed_data()))
    assert one.forward_backward(request([], forward_only=True)).failure.type == "empty_batch"
    assert not one.optim_step(lr=0.0).HasField("failure")


def test_a_step_that_the_gateway_knows_to_be_incomplete_is_refused(two):
    two.output(request(mixed_data()))
    step = two.optim_step(incomplete="the second chunk was too large")
    assert step.failure.type == "gradients_incomplete"
    assert "the second chunk was too large" in step.failure.message


@pytest.mark.parametrize(
    ("loss", "setting"), [("ppo", "clip_high_threshold"), ("stable_reinforce", "ratio_cap")]
)
def test_a_setting_beyond_float32_is_refused_and_the_trainer_goes_on(one, loss, setting):
    refused = one.forward_backward(request(mixed_data(), loss, settings={setting: 1e300}))
    assert refused.failure.type == "unknown_loss_setting"
    assert one.optim_step().failure.type == "gradients_incomplete"
    one.output(request(mixed_data(), loss))
    assert not one.optim_step(lr=0.0).HasField("failure")


@pytest.mark.parametrize(
    "setting", [{"lr": -1.0}, {"lr": float("nan")}, {"lr": 1e300}, {"eps": 0.0}, {"clip": -0.5}]
)
def test_optimizer_settings_out_of_range_are_refused(one, setting):
    one.output(request(mixed_data()))
    assert one.optim_step(**setting).failure.type == "optimizer_setting"
    assert not one.optim_step(lr=0.0).HasField("failure")


def test_gradients_that_are_not_finite_are_dropped(two, tmp_path):
    before = published(two, tmp_path)
    two.output(request([datum([5, 6], weights=[3e38, 3e38])]))
    assert two.optim_step().failure.type == "gradients_not_finite"
    after = published(two, tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_bytes_that_are_no_message_are_answered(one):
    assert one.forward_backward(b"\xff\xff").failure.type == "malformed_payload"
    assert one.optim_step().failure.type == "gradients_incomplete"


def test_operations_run_in_log_order_whatever_order_they_arrive_in(one):
    headers = [one.header() for _ in range(3)]
    payload = request(mixed_data(), forward_only=True).SerializeToString()
    calls = []
    for header in reversed(headers):
        calls.append(
            one.stub.ForwardBackward.future(
                trainer_pb2.ForwardBackwardRequest(header=header, payload=payload),
                metadata=one.metadata,
                timeout=CALL_SECONDS,
            )
        )
    for call in calls:
        assert not call.result().HasField("failure")
    assert one.describe().last_seq_id == headers[-1].seq_id


def test_a_repeated_operation_is_answered_and_not_applied_again(one):
    one.output(request(mixed_data()))
    header = one.header()
    step = trainer_pb2.OptimStepRequest(
        header=header, adamw=trainer_pb2.AdamWParams(learning_rate=0.0, eps=1e-8)
    )
    with ThreadPoolExecutor(2) as pool:
        replies = [
            pool.submit(one.stub.OptimStep, step, metadata=one.metadata, timeout=CALL_SECONDS)
            for _ in range(2)
        ]
        first, again = (reply.result() for reply in replies)
    assert first == again
    assert one.describe().step == first.step


def test_progress_is_told_during_a_long_operation_and_of_no_other(two):
    progress = two.progress
    assert progress() == trainer_pb2.ProgressReply()
    count, half_way, total = 750, True, 0
    while half_way is True:  # the operation ended before the first question
        data = mixed_data(count := 2 * count)
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(two.forward_backward, request(data, forward_only=True))
            half_way = wait_until(
                lambda: reply.done() or ((now := progress()).tokens_done and now),  # noqa: B023
                timeout=CALL_SECONDS,
            )
            total = reply.result().tokens
    assert (half_way.seq_id, half_way.tokens) == (two.seq_id, total)
    assert 0 < half_way.tokens_done <= total
    assert half_way.seconds > 0
    assert progress() == trainer_pb2.ProgressReply()


def test_a_call_without_the_secret_is_refused(one):
    with pytest.raises(grpc.RpcError) as caught:
        one.stub.Describe(trainer_pb2.DescribeTrainerRequest(), timeout=CALL_SECONDS)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_metrics_count_operations_and_steps(two):
    two.output(request(mixed_data()))
    step = two.optim_step()
    url = f"http://127.0.0.1:{two.report.metrics_port}/metrics"
    page = httpx.get(url, timeout=CALL_SECONDS).text
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert samples["tandem_trainer_step",] == step.step
    assert samples["tandem_trainer_micro_batch_tokens",] == two.describe().micro_batch_tokens == 40
    assert samples["tandem_trainer_operations_total", "OptimStep", "ok"] >= 1
    assert samples["tandem_trainer_tokens_total",] > 0


# --- Death -----------------------------------------------------------------------------------


def test_a_rank_killed_in_the_middle_of_an_operation_is_named_and_nothing_is_left(models, tmp_path):
    with trainer_process(models["qwen3"], tmp_path, ranks=2) as client:
        (rank_1,) = set(group_members(client.process.pid)) - {client.process.pid}
        os.kill(rank_1, signal.SIGSTOP)
        call = client.stub.ForwardBackward.future(
            trainer_pb2.ForwardBackwardRequest(
                header=client.header(), payload=request(mixed_data()).SerializeToString()
            ),
            metadata=client.metadata,
            timeout=CALL_SECONDS,
        )
        wait_until(lambda: client.progress().seq_id, timeout=CALL_SECONDS)
        os.kill(rank_1, signal.SIGKILL)
        error = call.exception()
        assert error.code() is grpc.StatusCode.ABORTED
        assert error.details() == "rank 1 was killed by SIGKILL"
        report = client.next_report()
        assert report.error_type == "worker_died"
        assert report.error == "rank 1 was killed by SIGKILL"
        assert client.process.wait(timeout=CALL_SECONDS) == 1
        assert group_members(client.process.pid) == []


def test_idle_ranks_outlive_the_collective_timeout_and_one_that_hangs_is_given_up_after_it(
    models, tmp_path
):
    with trainer_process(models["qwen3"], tmp_path, ranks=2, collective_timeout=8.0) as client:
        with pytest.raises(subprocess.TimeoutExpired):
            client.process.wait(timeout=10)
        assert not client.forward_backward(request(mixed_data())).HasField("failure")
        (rank_1,) = set(group_members(client.process.pid)) - {client.process.pid}
        os.kill(rank_1, signal.SIGSTOP)
        with pytest.raises(grpc.RpcError) as caught:
            client.forward_backward(request(mixed_data()))
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert "imed out" in caught.value.details()
        assert client.next_report().error_type == "worker_died"
        assert client.process.wait(timeout=CALL_SECONDS) == 1
        assert group_members(client.process.pid) == []


def test_when_rank_0_is_killed_its_ranks_end(models, tmp_path):
    with trainer_process(models["qwen3"], tmp_path, ranks=2) as client:
        (rank_1,) = set(group_members(client.process.pid)) - {client.process.pid}
        ended = os.pidfd_open(rank_1)
        client.process.kill()
        assert select.select([ended], [], [], CALL_SECONDS)[0]
        os.close(ended)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_ends_it_cleanly(models, tmp_path, ranks):
    with trainer_process(models["qwen3"], tmp_path, ranks=ranks) as client:
        os.killpg(client.process.pid, signal.SIGTERM)
        assert client.process.wait(timeout=CALL_SECONDS) == 0
        assert group_members(client.process.pid) == []


def test_a_model_that_is_not_there_is_reported(tmp_path):
    with trainer_process(tmp_path / "nothing", tmp_path, wait=False) as client:
        report = client.next_report()
        assert report.error_type == "worker_start_failed"
        assert "nothing" in report.error
        assert client.process.wait(timeout=CALL_SECONDS) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_does_not_fit_is_refused_with_numbers_before_it_is_loaded(
    models, tmp_path, ranks
):
    small = {"ranks": ranks, "memory_bytes": 1000}
    with trainer_process(models["qwen3"], tmp_path, wait=False, **small) as client:
        report = client.next_report()
        assert report.error_type == "worker_start_failed"
        assert "the model does not fit into memory: with 256 tokens at a time" in report.error
        assert "weights" in report.error and "What helps: more memory" in report.error
        assert client.process.wait(timeout=CALL_SECONDS) == 1


def test_the_memory_plan_is_told(one, two):
    alone, half = one.describe().memory, two.describe().memory
    assert alone.micro_batch_tokens == 2048 and not alone.checkpointing
    assert half.micro_batch_tokens == two.describe().micro_batch_tokens == 40
    assert half.device["weights"] < alone.device["weights"]
    assert sum(half.device.values()) <= half.device_available
