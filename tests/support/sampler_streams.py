"""Reads streams of a real sampler, and puts what they told together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from tandem.v1 import sampler_pb2, sampler_pb2_grpc
from tandem.wire.v1 import tinker_pb2 as wire
from tandem.worker import GRPC_OPTIONS
from tests.support.sampler_worker import Sampled, SamplerClient, decoded
from tests.support.worker_process import CALL_SECONDS


@dataclass
class Told:
    """What the deltas of one sample add up to."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk_ids: bytes = b""
    topk_logprobs: bytes = b""
    deltas: int = 0
    stopped: bool | None = None


@dataclass
class Streamed:
    told: dict[int, Told]
    reply: sampler_pb2.SampleReply

    @property
    def answer(self) -> Sampled:
        return decoded(self.reply)

    def adds_up(self) -> bool:
        """Whether the deltas are the answer, bit by bit, with nothing after a sample's end."""
        answer = self.answer
        assert sorted(self.told) == list(range(len(answer.samples)))
        for index, sample in enumerate(answer.samples):
            told = self.told[index]
            assert told.tokens == sample.tokens
            assert told.logprobs == sample.logprobs.tolist()
            assert told.stopped == sample.stopped
            if sample.topk is not None:
                assert told.topk_ids == sample.topk.token_ids
                assert told.topk_logprobs == sample.topk.logprobs
        return True


NARROW = [*GRPC_OPTIONS, ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 * 1024)]
"""A connection that takes little before somebody reads: else gRPC itself takes megabytes ahead."""


def open_stream(client: SamplerClient, request: sampler_pb2.SampleRequest) -> Any:
    return client.stub.SampleStream(request, metadata=client.metadata, timeout=CALL_SECONDS)


@contextmanager
def narrow_stream(client: SamplerClient, request: sampler_pb2.SampleRequest) -> Iterator[Any]:
    """As `open_stream`, over a connection of its own that is `NARROW`."""
    with grpc.insecure_channel(client.report.address, options=NARROW) as channel:
        stub = sampler_pb2_grpc.SamplerStub(channel)
        yield stub.SampleStream(request, metadata=client.metadata, timeout=CALL_SECONDS)


def gather(events: Iterable[sampler_pb2.SampleEvent]) -> Streamed:
    """Reads a stream to its end."""
    told: dict[int, Told] = {}
    reply = None
    for event in events:
        assert reply is None, "something came after the reply"
        if event.HasField("reply"):
            reply = event.reply
        else:
            add(told.setdefault(event.delta.index, Told()), event.delta)
    assert reply is not None
    return Streamed(told, reply)


def add(told: Told, delta: sampler_pb2.SampleDelta) -> None:
    assert told.stopped is None, "a delta came after the sample's end"
    told.deltas += 1
    tokens = np.frombuffer(delta.tokens, "<i4").tolist()
    told.tokens += tokens
    told.logprobs += np.frombuffer(delta.logprobs, "<f4").tolist()
    if delta.HasField("topk"):
        assert delta.topk.length == len(tokens)
        told.topk_ids += delta.topk.token_ids
        told.topk_logprobs += delta.topk.logprobs
    if delta.finished:
        told.stopped = delta.stop_reason == wire.STOP_REASON_STOP


def stream(client: SamplerClient, prompt: list[int], **arguments: Any) -> Streamed:
    return gather(open_stream(client, client.request(prompt, **arguments)))
