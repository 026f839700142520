"""Reads streams of a real sampler and adds up their deltas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from tandem.protocol.worker import GRPC_OPTIONS
from tandem.v1 import sampler_pb2, sampler_pb2_grpc
from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.sampler_worker import Sampled, SamplerClient, decoded
from tests.support.worker_process import CALL_SECONDS


@dataclass
class StreamedSample:
    """The sum of a sample's deltas. `versions` lists each token's version."""

    tokens: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk_ids: bytes = b""
    topk_logprobs: bytes = b""
    deltas: int = 0
    stopped: bool | None = None


@dataclass
class Streamed:
    samples: dict[int, StreamedSample]
    reply: sampler_pb2.SampleReply

    @property
    def answer(self) -> Sampled:
        return decoded(self.reply)

    def adds_up(self) -> bool:
        """Assert that the deltas equal the answer bit by bit, and that none follows a sample's
        end."""
        answer = self.answer
        assert sorted(self.samples) == list(range(len(answer.samples)))
        for index, sample in enumerate(answer.samples):
            streamed = self.samples[index]
            assert streamed.tokens == sample.tokens
            assert streamed.logprobs == sample.logprobs.tolist()
            assert streamed.stopped == sample.stopped
            if sample.topk is not None:
                assert streamed.topk_ids == sample.topk.token_ids
                assert streamed.topk_logprobs == sample.topk.logprobs
        return True


NARROW = [*GRPC_OPTIONS, ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 * 1024)]
"""Limits a connection's read-ahead, usually megabytes."""


def open_stream(client: SamplerClient, request: sampler_pb2.SampleRequest) -> Any:
    return client.stub.SampleStream(request, metadata=client.metadata, timeout=CALL_SECONDS)


@contextmanager
def narrow_stream(client: SamplerClient, request: sampler_pb2.SampleRequest) -> Iterator[Any]:
    """Stream over a separate `NARROW` connection."""
    with grpc.insecure_channel(client.report.address, options=NARROW) as channel:
        stub = sampler_pb2_grpc.SamplerStub(channel)
        yield stub.SampleStream(request, metadata=client.metadata, timeout=CALL_SECONDS)


def gather(events: Iterable[sampler_pb2.SampleEvent]) -> Streamed:
    samples: dict[int, StreamedSample] = {}
    reply = None
    for event in events:
        assert reply is None, "something came after the reply"
        if event.HasField("reply"):
            reply = event.reply
        else:
            _add(samples.setdefault(event.delta.index, StreamedSample()), event.delta)
    assert reply is not None
    return Streamed(samples, reply)


def _add(sample: StreamedSample, delta: sampler_pb2.SampleDelta) -> None:
    assert sample.stopped is None, "a delta came after the sample's end"
    sample.deltas += 1
    tokens = np.frombuffer(delta.tokens, "<i4").tolist()
    sample.tokens += tokens
    sample.versions += [delta.version] * len(tokens)
    sample.logprobs += np.frombuffer(delta.logprobs, "<f4").tolist()
    if delta.HasField("topk"):
        assert delta.topk.length == len(tokens)
        sample.topk_ids += delta.topk.token_ids
        sample.topk_logprobs += delta.topk.logprobs
    if delta.finished:
        sample.stopped = delta.stop_reason == wire.STOP_REASON_STOP


def stream(client: SamplerClient, prompt: list[int], **arguments: Any) -> Streamed:
    return gather(open_stream(client, client.request(prompt, **arguments)))
