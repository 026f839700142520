"""A sampler that reverses prompts: a gRPC server of the real protos."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np

from tandem.errors import TandemError
from tandem.protocol.worker import SECRET_METADATA_KEY, WorkerSpec
from tandem.v1 import sampler_pb2, sampler_pb2_grpc
from tandem.wire.v1 import tinker_pb2
from tests.support.gateway.fake_sleep import FakeSleep
from tests.support.gateway.sample_streams import answered


class FakeSampler(FakeSleep, sampler_pb2_grpc.SamplerServicer):
    """Answers a prompt with its reversed tokens, or the result of `speak`.

    Until their events are set, `gate` holds samples back (streams after their first token), and
    `slow_loads` the loads with these numbers. Token i has the logprob -i. Alternatives are the
    tokens 0, 1, … with logprobs 0, -1, …."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.requests: list[sampler_pb2.SampleRequest] = []
        self.cancelled: list[int] = []
        self.loaded: list[str] = []
        self.handoffs: list[str] = []
        self.slow_loads: dict[int, asyncio.Event] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.load_error: TandemError | None = None
        self.handoff_error: TandemError | None = None
        self.sample_error: TandemError | None = None
        self.speak = lambda tokens: tokens[::-1]
        self.max_length = 0

    async def Describe(self, request, context):
        awake, asleep = sampler_pb2.SAMPLER_STATE_AWAKE, sampler_pb2.SAMPLER_STATE_ASLEEP
        return sampler_pb2.DescribeSamplerReply(state=asleep if self.asleep else awake)

    async def Load(self, request, context):
        self.handoffs.append(request.handoff.name)
        error = self.load_error or (self.handoff_error if request.handoff.name else None)
        if error is not None:
            return sampler_pb2.LoadReply(failure=error.to_failure())
        self.loaded.append(request.version.name)
        if (slow := self.slow_loads.get(len(self.loaded))) is not None:
            await slow.wait()
        return sampler_pb2.LoadReply(version=request.version, bytes=7)

    async def Sample(self, requests, context):
        async for replies in answered(requests, partial(self._answer, context)):
            await context.write(replies)

    async def _answer(self, context, request):
        assert dict(context.invocation_metadata())[SECRET_METADATA_KEY] == self.spec.secret
        self.check_awake()
        self.requests.append(request)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.seq_id)
            raise
        if self.sample_error is not None:
            return sampler_pb2.SampleReply(failure=self.sample_error.to_failure())
        prompt = np.frombuffer(request.prompt_tokens, np.int32)
        tokens = np.array(self.speak(prompt.tolist()), np.int32)
        if request.params.HasField("max_tokens") and not request.params.max_tokens:
            tokens = tokens[:0]
        ended = None if len(tokens) else tinker_pb2.STOP_REASON_LENGTH
        response = tinker_pb2.SampleResponse(
            prompt_cache_hit_tokens=1, tandem_weight_version=request.version.name
        )
        if k := request.topk_prompt_logprobs:
            response.topk_prompt_logprobs.CopyFrom(_topk(len(prompt), k))
        if request.prompt_logprobs:
            logprobs = np.full(len(prompt), -1, np.float32)
            logprobs[: -request.prompt_logprobs_last_n or 1] = np.nan
            response.prompt_logprobs = logprobs.tobytes()
        if k := request.prompt_alt_tokens_k:
            for field, dtype in (("tokens", np.int64), ("logprobs", np.float32)):
                tensor = getattr(response.prompt_alt_tokens, field)
                tensor.dense = np.zeros((len(tokens) - 1, k), dtype).tobytes()
                tensor.dtype = (
                    tinker_pb2.DTYPE_INT64 if dtype is np.int64 else tinker_pb2.DTYPE_FLOAT32
                )
                tensor.shape.extend([len(tokens) - 1, k])
        for _ in range(request.num_samples):
            sequence = response.sequences.add(
                tokens=tokens.tobytes(),
                stop_reason=ended,
                logprobs=(-np.arange(len(tokens), dtype=np.float32)).tobytes(),
            )
            if request.in_flight:
                sequence.tandem_versions.add(
                    version=request.version.name, step=request.version.step, tokens=len(tokens)
                )
            if k := request.topk_sample_logprobs:
                sequence.topk_sampled_logprobs.CopyFrom(_topk(len(tokens), k))
        return sampler_pb2.SampleReply(
            response=response.SerializeToString(),
            version=request.version,
            prompt_tokens=len(prompt),
            cached_tokens=1,
            sampled_tokens=len(tokens) * request.num_samples,
            max_length=self.max_length,
            samples=[
                sampler_pb2.SampleVersions(runs=sequence.tandem_versions)
                for sequence in response.sequences
                if request.in_flight
            ],
        )

    async def SampleStream(self, request, context):
        gate, self.gate = self.gate, asyncio.Event()
        self.gate.set()
        try:
            reply = await self._answer(context, request)
        finally:
            self.gate = gate
        response = tinker_pb2.SampleResponse.FromString(reply.response)
        longest = max((len(s.tokens) // 4 for s in response.sequences), default=0)
        for at in range(max(1, longest)):
            for index, sequence in enumerate(response.sequences):
                delta = _delta(index, sequence, at, k=request.topk_sample_logprobs)
                yield sampler_pb2.SampleEvent(delta=delta)
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled.append(request.seq_id)
                raise
        yield sampler_pb2.SampleEvent(reply=reply)


def _topk(length: int, k: int) -> tinker_pb2.TopkLogprobs:
    ids = np.tile(np.arange(k, dtype=np.int32), (length, 1))
    return tinker_pb2.TopkLogprobs(
        token_ids=ids.tobytes(), logprobs=(-ids).astype(np.float32).tobytes(), k=k, length=length
    )


def _delta(index: int, sequence, at: int, *, k: int) -> sampler_pb2.SampleDelta:
    here = slice(4 * at, 4 * at + 4)
    delta = sampler_pb2.SampleDelta(
        index=index,
        tokens=sequence.tokens[here],
        logprobs=sequence.logprobs[here],
        finished=4 * at + 4 >= len(sequence.tokens),
        stop_reason=sequence.stop_reason,
    )
    if k:
        delta.topk.CopyFrom(_topk(len(delta.tokens) // 4, k))
    return delta
