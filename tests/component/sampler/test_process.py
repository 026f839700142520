"""A real sampler process: callers, mistakes, and its end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from tandem.agent.worker_process import group_members
from tandem.protocol.worker import SECRET_METADATA_KEY
from tandem.v1 import sampler_pb2
from tests.support.architectures import write_model
from tests.support.sampler_worker import (
    LENGTH,
    PROMPT,
    SamplerClient,
    decoded,
    same,
    sampler_process,
)
from tests.support.tiny_model import VOCABULARY
from tests.support.waiting import wait_until
from tests.support.worker_process import CALL_SECONDS, SECRET


def test_a_mistake_is_answered_and_affects_no_other_request(sampler: SamplerClient):
    calls = [
        sampler.send(each)
        for each in [
            sampler.request(PROMPT, seed=1),
            sampler.request([VOCABULARY]),
            sampler.request([]),
            sampler.request([5] * LENGTH),
            sampler.request(PROMPT, seed=1),
        ]
    ]
    replies = [call.result() for call in calls]
    assert [reply.failure.type for reply in replies[1:4]] == [
        "token_out_of_vocabulary",
        "empty_batch",
        "sequence_too_long",
    ]
    assert same(decoded(replies[0]), decoded(replies[4]))


def test_requests_on_one_stream_are_answered_each_when_it_is_there(sampler: SamplerClient):
    requests = [
        sampler.request(PROMPT, n=500, max_tokens=500, stop=[]),
        *(sampler.request(PROMPT, seed=seed, n=2) for seed in range(5)),
        sampler.request(PROMPT, max_tokens=-1),
    ]
    for number, request in enumerate(requests):
        request.number = number
    ended = threading.Event()

    def batches() -> Iterator[sampler_pb2.SampleRequests]:
        yield sampler_pb2.SampleRequests(requests=requests)
        ended.wait(CALL_SECONDS)
        yield sampler_pb2.SampleRequests(cancelled=[0])

    stream = sampler.stub.Sample(batches(), metadata=sampler.metadata, timeout=CALL_SECONDS)
    replies = {}
    for batch in stream:
        replies |= {reply.number: reply for reply in batch.replies}
        if len(replies) == 6:
            ended.set()
    assert sorted(replies) == [1, 2, 3, 4, 5, 6]
    assert replies[6].failure.type == "invalid_request"
    for number in range(1, 6):
        alone = sampler.sample(PROMPT, seed=number - 1, n=2)
        assert same(decoded(replies[number]), alone)
    wait_until(lambda: not sampler.describe().running)


def test_a_call_without_the_secret_is_refused(sampler: SamplerClient):
    for metadata in ((), ((SECRET_METADATA_KEY, "wrong"),)):
        request = sampler_pb2.SampleRequests(requests=[sampler.request(PROMPT)])
        call = sampler.stub.Sample(iter([request]), metadata=metadata, timeout=CALL_SECONDS)
        with pytest.raises(grpc.RpcError) as raised:
            next(call)
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_cancelled_call_leaves_nothing_running(either: SamplerClient):
    call = either.send(either.request(PROMPT, n=500, max_tokens=500, stop=[]))
    while not either.describe().running:
        pass
    call.cancel()
    either.sample(PROMPT, max_tokens=1)  # admitted among them or behind them
    while (described := either.describe()).running:
        pass
    assert (described.running, described.waiting) == (0, 0)


CALLER = """
import sys, grpc
from tandem.v1 import sampler_pb2, sampler_pb2_grpc
request = sampler_pb2.SampleRequests.FromString(sys.stdin.buffer.read())
stub = sampler_pb2_grpc.SamplerStub(grpc.insecure_channel(sys.argv[1]))
next(stub.Sample(iter([request]), metadata=((sys.argv[2], sys.argv[3]),)))
"""


def test_the_samples_of_a_caller_that_is_killed_leave_the_engine(sampler: SamplerClient):
    """As after a gateway's death, which engines survive."""

    def answered() -> list[str]:
        metrics = f"http://127.0.0.1:{sampler.report.metrics_port}/metrics"
        lines = httpx.get(metrics, timeout=CALL_SECONDS).text.splitlines()
        return [line for line in lines if line.startswith("tandem_sampler_requests_total")]

    before = answered()
    long = sampler_pb2.SampleRequests(
        requests=[sampler.request(PROMPT, n=500, max_tokens=500, stop=[])]
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, sampler.report.address, SECRET_METADATA_KEY, SECRET],
        stdin=subprocess.PIPE,
    )
    assert caller.stdin is not None
    with caller, caller.stdin:
        caller.stdin.write(long.SerializeToString())
        caller.stdin.close()
        wait_until(lambda: sampler.describe().running)
        caller.kill()
    wait_until(lambda: not sampler.describe().running)
    assert answered() == before, "it was not computed to its end"


@pytest.mark.parametrize("engine_process", ["off", "on"])
def test_a_directory_without_a_model_is_reported_and_ends_the_process(
    tmp_path: Path, engine_process: str
):
    with sampler_process(tmp_path, wait=False, engine_process=engine_process) as client:
        report = client.next_report()
        assert report.error_type == "worker_start_failed"
        assert "config.json" in report.error
        assert client.process.wait(timeout=CALL_SECONDS) == 1


@pytest.mark.parametrize("engine_process", ["off", "on"])
def test_a_terminated_sampler_ends_before_it_is_ready_and_says_unavailable(
    model: Path, engine_process: str
):
    with sampler_process(model, wait=False, engine_process=engine_process) as client:
        with pytest.raises(grpc.RpcError) as raised:
            client.stub.Describe(
                sampler_pb2.DescribeSamplerRequest(),
                metadata=((SECRET_METADATA_KEY, SECRET),),
                timeout=CALL_SECONDS,
                wait_for_ready=True,
            )
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        client.process.terminate()
        assert client.process.wait(timeout=CALL_SECONDS) == 0
        assert not group_members(client.process.pid)


def test_the_engine_reads_no_pickle_and_runs_no_code_of_a_model(model: Path):
    from sampler_service.vllm.configuration import engine_args
    from tandem.settings.workers import SamplerSettings

    arguments = engine_args(model, SamplerSettings())
    assert (arguments.load_format, arguments.trust_remote_code) == ("safetensors", False)


def test_the_sizes_of_heads_are_those_of_the_cpu_build():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from tandem.weights.model_config import CPU_HEADS

    assert list(CPU_HEADS) == CPUAttentionBackend.get_supported_head_sizes()


@pytest.mark.parametrize(
    ("changes", "size"),
    [({"head_dim": 16}, 16), pytest.param({"head_dim": 48}, 48, marks=pytest.mark.nightly)],
)
def test_heads_that_the_cpu_build_does_not_compute_are_named_when_the_sampler_starts(
    tmp_path: Path, changes: dict[str, int], size: int
):
    base = write_model(tmp_path / "base", "qwen3", **changes)
    with sampler_process(base, wait=False) as client:
        report = client.next_report()
        while not report.error_type:
            report = client.next_report()
        assert report.error_type == "worker_start_failed"
        assert f"attention heads have {size} numbers each" in report.error
        assert "computes heads of 32, 64, 80" in report.error
        assert client.process.wait(timeout=CALL_SECONDS) == 1
