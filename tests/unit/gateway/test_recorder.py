"""Every sampled token of random conversations with branches is the trained one."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
import tracemalloc
from array import array
from collections import Counter
from itertools import accumulate

import numpy as np
import pytest

from gateway.api.openai.recording import TurnRecording
from gateway.api.openai.schemas import ChatCompletionRequest
from gateway.api.openai.tokenizer import ModelTokenizer
from gateway.checkpoints.versions import WeightVersion
from gateway.metrics import Metrics
from gateway.owners.limits import Quotas
from gateway.recorder import store as stores
from gateway.recorder.conversation import Conversations, Digests, RecordedTurn, encode_messages
from gateway.recorder.store import TraceStore
from tandem.errors import LimitExceeded, StorageFailed, TraceEnded, UnknownTrace
from tandem.settings.requests import LimitSettings
from tandem.wire.v1 import tinker_pb2
from tests.support.gateway.speaking_models import byte_tokenizer, write_speaking_model

VERSION = WeightVersion(name="run/v3", path="p", run_id="run", step=3, base_model="agent")
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = write_speaking_model(tmp_path_factory.mktemp("agent") / "m", byte_tokenizer())
    return ModelTokenizer("agent", folder)


def make_store(folder, **changes) -> TraceStore:
    quotas = Quotas(settings=LimitSettings(), metrics=Metrics())
    return TraceStore(folder=folder / "traces", limits=quotas, **changes)


async def opened(folder, **changes) -> TraceStore:
    store = make_store(folder, **changes)
    await store.find_traces()
    return store


async def new_trace(store, owner="ann"):
    return await store.create_trace(owner=owner, key_id="k", model="agent", fields={})


class Sampler:
    """Draws random tokens, in flight through several versions or from one."""

    def __init__(self, seed: int, tokenizer) -> None:
        self.random = random.Random(seed)
        self.end = tokenizer.end_tokens or (byte_tokenizer().token_to_id("<eos>"),)
        self.sampled: list[tuple[list[int], list[int], list[float], list[int]]] = []

    def answer(self, prompt: list[int]) -> tinker_pb2.SampledSequence:
        draw = self.random
        ended = draw.random() < 0.8
        tokens = [draw.randrange(256) for _ in range(draw.randrange(1, 12))]
        tokens += [self.end[0]] * ended
        logprobs = np.array([-draw.random() for _ in tokens], np.float32)
        steps = [VERSION.step] * len(tokens)
        found = tinker_pb2.SampledSequence(
            tokens=array("i", tokens).tobytes(),
            logprobs=logprobs.tobytes(),
            stop_reason=tinker_pb2.STOP_REASON_STOP if ended else tinker_pb2.STOP_REASON_LENGTH,
        )
        if draw.random() < 0.3 and len(tokens) > 1:
            cut = draw.randrange(1, len(tokens))
            steps = [7] * cut + [8] * (len(tokens) - cut)
            found.tandem_versions.add(version="run/v7", step=7, tokens=cut)
            found.tandem_versions.add(version="run/v8", step=8, tokens=len(tokens) - cut)
        self.sampled.append((prompt, tokens, logprobs.tolist(), steps))
        return found


async def play(store, trace, tokenizer, sampler: Sampler, turns: int) -> None:
    draw, known = sampler.random, [[]]
    while len(sampler.sampled) < turns:
        before = known[draw.randrange(max(0, len(known) - 50), len(known))]
        if len(before) > 16:
            before = []
        role = "tool" if before and draw.random() < 0.5 else "user"
        messages = [*before, {"role": role, "content": f"{draw.randrange(1000)} the"}]
        if draw.random() < 0.05:  # as an agent that edits what was said
            messages = [{"role": "system", "content": "edited"}, *messages]
        request = ChatCompletionRequest(model="agent", messages=messages)
        recording = TurnRecording(store, trace, await store.read_turns(trace), request)
        prompt = list(recording.prompt(tokenizer, max_length=None).token_ids)
        one = sampler.answer(prompt)
        tokens = [t for t in array("i", one.tokens) if t not in tokenizer.end_tokens]
        answer = {"role": "assistant", "content": tokenizer.decode(tokens), "refusal": None}
        await recording.record(tinker_pb2.SampleResponse(sequences=[one]), [answer], VERSION)
        known.append([*messages, {"role": "assistant", "content": answer["content"]}])


def check(conversations: Conversations, sampler: Sampler) -> None:
    trained: Counter[int] = Counter()
    for sequence in conversations.sequences():
        for number in sequence.turns:
            prompt, tokens, logprobs, steps = sampler.sampled[number]
            at = slice(len(prompt), len(prompt) + len(tokens))
            assert sequence.tokens[: at.stop] == [*prompt, *tokens]
            assert sequence.logprobs[at] == logprobs
            assert sequence.steps[at] == steps
            assert len({*sequence.mask[at]}) == 1
            trained[number] += sequence.mask[at.start]
        sampled = sum(len(sampler.sampled[number][1]) for number in sequence.turns)
        assert len(sequence.tokens) - sequence.steps.count(None) == sampled
        ends = [*accumulate(run.tokens for _, run in sequence.versions)]
        assert ends[-1] == sampled
    assert trained == dict.fromkeys(range(len(sampler.sampled)), 1)


def test_each_of_10000_turns_is_trained_once_with_its_tokens_logprobs_and_steps(
    tokenizer, tmp_path
):
    async def main():
        store = await opened(tmp_path)
        trace, _key = await new_trace(store)
        sampler = Sampler(seed=5, tokenizer=tokenizer)
        await play(store, trace, tokenizer, sampler, turns=10_000)
        check(await store.read_turns(trace), sampler)
        parents = [turn.parent for turn in (await store.read_turns(trace)).turns]
        branches = Counter(parent for parent in parents if parent is not None)
        assert sum(count > 1 for count in branches.values()) > 1000
        again = await opened(tmp_path)  # as the next gateway
        check(await again.read_turns(again.require_trace(trace.head.id)), sampler)

    asyncio.run(main())


def test_an_answer_is_found_whatever_a_client_leaves_out_of_it():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    recorded = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    digest = Digests([USER], []).after(recorded)
    other = call | {"id": "2", "function": {"name": "f", "arguments": {"a": 1}}}
    for repeated in (
        {"role": "assistant", "content": "", "tool_calls": [other]},
        {"role": "assistant", "content": " ", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "assistant", "content": [], "tool_calls": [call], "audio": None},
    ):
        assert Digests([USER, repeated], [])[2] == digest
    for different in (
        {"role": "assistant", "content": "x", "tool_calls": [call]},
        {"role": "assistant", "content": None},
    ):
        assert Digests([USER, different], [])[2] != digest
    assert Digests([USER, recorded], ["other tools"])[2] != digest


def turn(**changes) -> RecordedTurn:
    fields = {
        "parent": None,
        "prompt": [1],
        "tokens": [2],
        "logprobs": [-1.0],
        "versions": [],
        "messages": encode_messages([USER, {"role": "assistant", "content": "x" * 1000}]),
        "digest": b"d",
        "stop_reason": "stop",
    }
    return RecordedTurn(**(fields | changes))


def test_a_trace_ends_after_a_day_and_is_removed_a_day_later(tmp_path):
    async def main():
        now = 1000.0
        store = await opened(tmp_path, clock=lambda: now)
        trace, key = await new_trace(store)
        store.check_open(trace)
        now += stores.TRACE_TTL
        with pytest.raises(TraceEnded, match="has expired"):
            store.check_open(trace)
        await store.expire_traces()
        assert store.find_by_key(trace.head.id, key.encode()) is trace
        now += stores.TRACE_TTL
        await store.expire_traces()
        assert store.find_by_key(trace.head.id, key.encode()) is None
        assert not [*store.folder.iterdir()]

    asyncio.run(main())


def test_a_full_trace_takes_no_more_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "TRACE_BYTES", 3000)

    async def main():
        store = await opened(tmp_path)
        trace, _key = await new_trace(store)
        await store.add_turns(trace, [turn()])
        store.check_open(trace)
        for more in (
            store.add_turns(trace, [turn(), turn()]),
            store.add_turns(trace, [turn()] * 9),
        ):
            with pytest.raises(TraceEnded, match="the most that a trace may have"):
                await more
        with pytest.raises(TraceEnded, match="the most that a trace may have"):
            store.check_open(trace)
        assert trace.file.stat().st_size == trace.bytes < 3000
        assert len((await store.read_turns(trace)).turns) == 1
        again = await opened(tmp_path)  # as the next gateway
        trace = again.require_trace(trace.head.id)
        with pytest.raises(TraceEnded, match="the most that a trace may have"):
            again.check_open(trace)
        assert len((await again.read_turns(trace)).turns) == 1
        await again.remove_trace(trace)
        assert not [*again.folder.iterdir()]

    asyncio.run(main())


def test_traces_beyond_the_memory_are_read_again_from_their_files(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "_CACHED_BYTES", 5000)

    async def main():
        store = await opened(tmp_path)
        traces = [(await new_trace(store))[0] for _ in range(10)]
        for _round in range(3):
            for trace in traces:
                await store.add_turns(trace, [turn()])
        assert sum(trace.conversations is not None for trace in traces) < 5
        for trace in traces:
            assert len((await store.read_turns(trace)).turns) == 3

    asyncio.run(main())


def test_the_memory_counts_what_turns_take(tmp_path):
    messages = encode_messages([{"role": "user", "content": [{}] * 10_000}])

    async def main():
        store = await opened(tmp_path)
        trace, _key = await new_trace(store)
        await store.add_turns(trace, [turn(messages=messages, tokens=array("i", [2] * 10_000))])
        again = await opened(tmp_path)
        tracemalloc.start()
        found = await again.read_turns(again.require_trace(trace.head.id))
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert taken < 1.5 * found.size
        for each in (store, again):
            assert each._cached_bytes == found.size
        await again.remove_trace(again.require_trace(trace.head.id))
        assert again._cached_bytes == 0

    asyncio.run(main())


def test_a_turn_is_synced_before_it_counts_as_recorded(tmp_path, monkeypatch):
    def fail(_fd):
        raise OSError(errno.EIO, "Input/output error")

    async def main():
        store = await opened(tmp_path)
        trace, _key = await new_trace(store)
        await store.add_turns(trace, [turn(digest=b"1")])
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(StorageFailed, match="was not recorded"):
                await store.add_turns(trace, [turn(digest=b"2")])
            with pytest.raises(StorageFailed, match="was not written"):
                await new_trace(store)
        assert [*store.folder.iterdir()] == [trace.file]
        await store.add_turns(trace, [turn(digest=b"3")])
        store = await opened(tmp_path)
        found = await store.read_turns(store.require_trace(trace.head.id))
        assert [each.digest for each in found.turns] == [b"1", b"3"]

    asyncio.run(main())


def test_a_line_that_a_crash_cut_is_forgotten_and_overwritten(tmp_path):
    async def main():
        store = await opened(tmp_path)
        trace, _key = await new_trace(store)
        await store.add_turns(trace, [turn()])
        with trace.file.open("ab") as file:
            file.write(b'{"parent": nu')
        store = await opened(tmp_path)
        trace = store.require_trace(trace.head.id)
        await store.add_turns(trace, [turn()])
        store = await opened(tmp_path)
        assert len((await store.read_turns(store.require_trace(trace.head.id))).turns) == 2

    asyncio.run(main())


def test_a_failed_write_keeps_the_earlier_turns(tmp_path):
    async def main():
        store = await opened(tmp_path)
        trace, _key = await new_trace(store)
        await store.add_turns(trace, [turn()])
        moved = trace.file.rename(trace.file.with_suffix(".moved"))
        with pytest.raises(StorageFailed, match="was not recorded"):
            await store.add_turns(trace, [turn()])
        moved.rename(trace.file)
        await store.add_turns(trace, [turn()])
        assert len((await store.read_turns(trace)).turns) == 2

    asyncio.run(main())


def test_a_client_that_ends_during_a_write_leaves_the_next_turn_whole(tmp_path, monkeypatch):
    async def main():
        store = await opened(tmp_path)
        trace, _key = await new_trace(store)
        begun, go_on, append = threading.Event(), threading.Event(), stores._append

        def slow(file, lines, *, at):
            begun.set()
            assert go_on.wait(30)
            append(file, lines, at=at)

        monkeypatch.setattr(stores, "_append", slow)
        first = asyncio.create_task(store.add_turns(trace, [turn(digest=b"1")]))
        await asyncio.to_thread(begun.wait, 30)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        monkeypatch.setattr(stores, "_append", append)
        second = asyncio.create_task(store.add_turns(trace, [turn(digest=b"2")]))
        asyncio.get_running_loop().call_later(0.2, go_on.set)
        await second
        store = await opened(tmp_path)
        found = await store.read_turns(store.require_trace(trace.head.id))
        assert [each.digest for each in found.turns] == [b"1", b"2"]

    asyncio.run(main())


def test_a_repeated_call_may_have_arguments_of_any_depth():
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    assert len(Digests([{"role": "assistant", "tool_calls": [call]}], [])) == 2


def test_a_turn_of_broken_weights_is_read_again_with_its_nan(tmp_path):
    async def main():
        store = await opened(tmp_path)
        trace, _key = await new_trace(store)
        await store.add_turns(trace, [turn(tokens=[2, 3], logprobs=[float("nan"), -1.0])])
        store = await opened(tmp_path)
        (found,) = (await store.read_turns(store.require_trace(trace.head.id))).turns
        assert str([*found.logprobs]) == "[nan, -1.0]"

    asyncio.run(main())


def test_a_turn_of_a_deleted_trace_is_refused_and_leaves_no_file(tmp_path):
    async def main():
        store = await opened(tmp_path)
        trace, _key = await new_trace(store)
        await store.remove_trace(trace)
        with pytest.raises(UnknownTrace):
            await store.add_turns(trace, [turn()])
        assert not [*store.folder.iterdir()]

    asyncio.run(main())


def test_an_owner_has_a_limit_of_traces(tmp_path):
    async def main():
        store = await opened(tmp_path)
        store.limits.own["ann"] = {"traces": 1}
        await new_trace(store)
        with pytest.raises(LimitExceeded, match="delete the traces"):
            await new_trace(store)
        await new_trace(store, owner="ben")

    asyncio.run(main())
