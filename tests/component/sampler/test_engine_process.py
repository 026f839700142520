"""Engines in their own process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from tandem.agent.worker_process import group_members
from tandem.v1 import sampler_pb2
from tests.support.sampler_worker import PROMPT, SamplerClient, same, sampler_process
from tests.support.waiting import wait_until
from tests.support.worker_process import CALL_SECONDS

pytestmark = pytest.mark.slow


def engine_of(client: SamplerClient) -> psutil.Process:
    sampler = psutil.Process(client.process.pid)
    (engine,) = wait_until(sampler.children)
    return engine


def test_what_it_computes_is_the_same_to_the_last_bit(sampler: SamplerClient, own: SamplerClient):
    asked = [
        {"n": 8, "seed": 3, "max_tokens": 40, "stop": []},
        {"n": 2, "seed": 4, "topk": 3, "prompt_logprobs": True, "draws": 2, "prompt_topk": 2},
        {"n": 2, "seed": 5, "max_tokens": 60, "stop": ["a", "zz"], "temperature": 0.7},
        {"seed": 6, "structured": sampler_pb2.StructuredOutput(regex="[0-9]{3}-[a-f]+")},
        {"temperature": 0.0, "max_tokens": 30},
    ]
    answers = [
        client.sample_all([client.request(PROMPT, **each) for each in asked])
        for client in (sampler, own)
    ]
    for here, there in zip(*answers, strict=True):
        assert same(here, there)
    assert len(psutil.Process(own.process.pid).children()) == 1


def test_a_sampler_that_is_killed_takes_its_engine_along(model: Path):
    with sampler_process(model, wait=False, engine_process="on") as client:
        engine_of(client)
        client.process.kill()
        wait_until(lambda: not group_members(client.process.pid))


def test_an_engine_that_dies_while_it_starts_is_reported(model: Path):
    with sampler_process(model, wait=False, engine_process="on") as client:
        engine_of(client).kill()
        report = client.next_report()
        assert report.error_type == "worker_start_failed"
        assert "was killed by signal 9" in report.error
        assert client.process.wait(timeout=CALL_SECONDS) == 1


def test_a_sampler_ends_with_its_engine_and_says_so_on_streams_that_stay_open(model: Path):
    with sampler_process(model, engine_process="on") as client:
        over = threading.Event()

        def asked() -> Iterator[sampler_pb2.SampleRequests]:
            request = client.request(PROMPT, n=500, max_tokens=500, stop=[])
            yield sampler_pb2.SampleRequests(requests=[request])
            over.wait(CALL_SECONDS)

        stream = client.stub.Sample(asked(), metadata=client.metadata, timeout=CALL_SECONDS)
        wait_until(lambda: client.describe().running)
        engine_of(client).kill()
        ((reply,),) = [batch.replies for batch in stream]
        assert reply.failure.type == "worker_died"
        assert "was killed by signal 9" in reply.failure.message
        assert stream.code() is grpc.StatusCode.OK, "it ended, and was not cut off"
        over.set()
        assert client.process.wait(timeout=CALL_SECONDS) == 1
        assert not group_members(client.process.pid)


_WITH_A_FAKE = """
import os, signal, time
from pathlib import Path
from sampler_service.engine import EngineRequest, StepOutput
from sampler_service.service.engine_process import EngineProcess, EngineProcessEnded, _limit_waits
from tests.support.fake_engine import FakeEngine

class Stuck(FakeEngine):
    def abort(self, ids):
        super().abort([id_ for id_ in ids if id_ in self.left])

    def load(self, directory):
        time.sleep(60)

def stuck(on_lost):
    time.sleep(60)

def request(steps):
    return EngineRequest(id="r", prompt=[1], num_samples=1, max_tokens=steps)

def raised(call):
    try:
        call()
    except EngineProcessEnded as error:
        return str(error)

def forked(start, patience):
    return EngineProcess.fork(start, model=Path("m"), patience=patience)

engine = forked(lambda on_lost: Stuck(), 60).connect(lambda: None)
def sampled(steps):
    engine.add(request(steps))
    while True:
        for result in engine.step().results:
            return result

assert len(sampled(3).samples[0].tokens) == 3
engine.add(request(2))
while not engine._ahead.results:
    engine.memory()  # it computes ahead, without a step
engine.abort(["r"])
assert engine.settle() == StepOutput(), "of what was dropped nothing is left"
assert len(sampled(4).samples[0].tokens) == 4
assert sampled(101).failure.type == "sequence_too_long"
engine._patience = 0.5
print(raised(lambda: engine.load(Path("m"))))
engine.kill_engine()
process = forked(stuck, 0.5)
print(raised(lambda: process.connect(lambda: None)))
process.kill_engine()

def stopped():
    engine = forked(lambda on_lost: FakeEngine(), 60).connect(lambda: None)
    engine._patience = 0.5
    _limit_waits(engine._connection, 0.5)
    os.kill(engine._pid, signal.SIGSTOP)
    return engine

engine = stopped()
engine.add(request(3))
print(raised(lambda: [engine.step() for _ in range(9)]))
engine.kill_engine()
engine = stopped()
engine.add(EngineRequest(id="r", prompt=[1] * 10**6, num_samples=1, max_tokens=1))
print(raised(engine.step))
engine.kill_engine()
engine = forked(lambda on_lost: FakeEngine(), 60).connect(lambda: None)
engine._connection.send_bytes(b"no message")
print(raised(engine.memory))
"""


def test_nothing_is_left_of_what_was_dropped_and_no_call_is_waited_for_without_a_deadline():
    done = subprocess.run(
        [sys.executable, "-c", _WITH_A_FAKE], capture_output=True, text=True, timeout=CALL_SECONDS
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "its process did not end load within 0.5 s",
        "its process did not end its start within 0.5 s",
        "its process did not end a step within 0.5 s",
        "its process did not read what it is told within 0.5 s",
    ]
    assert lines[-1] == "its process ended with status 1", "what it logs of it is before"
