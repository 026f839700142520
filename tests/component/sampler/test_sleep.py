"""A real engine sleeps and wakes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from tandem.agent.worker_process import group_members
from tandem.protocol.fencing import FENCED_METADATA_KEY
from tandem.v1 import sampler_pb2
from tests.support.adapter_files import write_adapter_files, write_merged
from tests.support.sampler_worker import (
    LENGTH,
    PROMPT,
    Sampled,
    SamplerClient,
    publish,
    publish_adapter,
    same,
    sampler_process,
)
from tests.support.tiny_model import write_tiny_model
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

CACHE = 256 * 2**20
FULL, WRITTEN = 16, 24 * 2**20
"""Prompts that fill part of the cache, and the least bytes that they write there."""
LEASE = 5
LEVELS = (1, 2)


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[SamplerClient]:
    with sampler_process(model, lease=LEASE, max_lora_rank=4, engine_process="on") as client:
        yield client


def seeded(client: SamplerClient, **arguments: object) -> Sampled:
    return client.sample(
        PROMPT, seed=3, n=2, max_tokens=20, stop=[], prompt_logprobs=True, **arguments
    )


def loads(client: SamplerClient) -> int:
    return int(client.metric("tandem_sampler_load_seconds_count"))


@pytest.mark.parametrize(
    ("architecture", "engine_process"),
    [("qwen3", "on"), pytest.param("llama", "off", marks=pytest.mark.nightly)],
)
def test_each_level_gives_its_memory_back_and_samples_are_the_same_afterwards(
    directory: Path, architecture, engine_process: str
):
    """With tied embeddings, and with a separate head."""
    large = write_tiny_model(
        directory / f"large {architecture}",
        architecture=architecture,
        head_dim=32,
        max_length=LENGTH,
        hidden=512,
        intermediate=4096,
    )
    weights = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    assert weights > 60 * 2**20
    with sampler_process(
        large, lease=LEASE, kv_cache_bytes=CACHE, engine_process=engine_process
    ) as client:
        expected = seeded(client)
        fresh = client.resident_bytes
        for first in range(FULL):
            client.sample([3 + first, *range(3, 80)] + [4] * (LENGTH - 80), max_tokens=1)
        before = client.resident_bytes
        assert before - fresh > WRITTEN
        reply = client.sleep(1)
        kept = client.resident_bytes
        assert before - kept > WRITTEN
        assert reply.bytes_moved > WRITTEN
        assert abs(reply.device_bytes - kept) < 8 * 2**20
        client.wake()
        assert same(seeded(client), expected)
        client.sleep(2)
        assert kept - client.resident_bytes > 0.8 * weights
        client.wake()
        assert same(seeded(client), expected)


def test_a_sampler_that_is_asleep_refuses_samples_and_so_does_one_whose_caller_has_an_old_lease(
    client: SamplerClient,
):
    old = client.token
    client.sleep()
    assert client.describe().state == sampler_pb2.SAMPLER_STATE_ASLEEP
    for token, reason in [(client.token, "asleep"), (old, f"its newest is {client.token}")]:
        newest = client.token
        client.lease(token)
        with pytest.raises(grpc.RpcError, match=reason) as refused:
            client.sample(PROMPT)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (FENCED_METADATA_KEY, str(newest)) in refused.value.trailing_metadata()
        client.lease(newest)
    newest = client.token
    client.lease(old - 1)
    with pytest.raises(grpc.RpcError, match="a newer call came before"):
        client.wake()
    client.lease(newest)
    assert client.describe().state == sampler_pb2.SAMPLER_STATE_ASLEEP
    client.wake()
    assert client.describe().state == sampler_pb2.SAMPLER_STATE_AWAKE
    seeded(client)


def test_a_switch_to_what_it_is_already_is_answered_at_once(client: SamplerClient):
    assert client.wake().seconds == 0
    assert client.sleep().seconds > 0
    assert client.sleep(2).seconds == 0
    assert client.wake().seconds > 0
    assert client.wake().seconds == 0


def test_a_level_that_there_is_not_is_refused(client: SamplerClient):
    assert client.sleep(3).failure.type == "invalid_request"
    assert client.describe().state == sampler_pb2.SAMPLER_STATE_AWAKE


@pytest.mark.parametrize("level", LEVELS)
def test_a_wake_with_a_newer_version_loads_it_once(
    client: SamplerClient, model: Path, changed: Path, directory: Path, level: int
):
    version = publish(changed, directory, number=200 + level)
    client.assert_serves(client.base, model)
    before = loads(client)
    client.sleep(level)
    reply = client.wake(version)
    assert not reply.HasField("failure")
    assert reply.version.name == client.describe().version.name == version.name
    client.assert_serves(version, changed)
    assert loads(client) == before + 1
    client.assert_serves(client.base, model)


@pytest.mark.parametrize("level", LEVELS)
def test_a_wake_with_a_damaged_version_serves_the_one_before(
    client: SamplerClient, model: Path, changed: Path, directory: Path, level: int
):
    version = publish(changed, directory, number=210 + level)
    file = next(Path(version.path).glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    client.assert_serves(client.base, model)
    client.sleep(level)
    reply = client.wake(version)
    assert not reply.HasField("failure")
    assert reply.version.name == client.describe().version.name == client.base.name
    assert client.refusal(client.request(PROMPT, version=version)).type == "load_failed"
    client.assert_serves(client.base, model)


@pytest.mark.parametrize("level", LEVELS)
def test_what_runs_ends_before_the_sleep_and_what_waits_is_answered_after_the_wake(
    client: SamplerClient, changed: Path, directory: Path, level: int
):
    version = publish(changed, directory, number=220 + level)
    running = client.send(client.request(PROMPT, n=50, max_tokens=400, stop=[]))
    wait_until(lambda: client.describe().running == 1)
    waiting = client.send(client.request(PROMPT, version=version, max_tokens=4))
    wait_until(lambda: client.describe().waiting == 1)
    assert not client.sleep(level).HasField("failure")
    assert not running.result().HasField("failure")
    described = client.describe()
    assert (described.state, described.waiting) == (sampler_pb2.SAMPLER_STATE_ASLEEP, 1)
    client.wake()
    assert waiting.result().version.name == version.name


@pytest.mark.parametrize("level", LEVELS)
def test_adapters_are_served_after_a_sleep(
    client: SamplerClient, model: Path, directory: Path, level: int
):
    folder = directory / f"adapter that sleeps {level}"
    files = write_adapter_files(folder / "adapter", model, seed=20 + level)
    merged = write_merged(folder / "merged", model, files)
    version = publish_adapter(files, directory, number=230 + level, merged=merged)
    client.assert_serves(version, merged)
    expected = seeded(client, version=version)
    client.sleep(level)
    client.wake()
    assert (version.name in client.describe().adapters) == (level == 1)
    assert same(seeded(client, version=version), expected)
    client.assert_serves(version, merged)


@pytest.mark.parametrize("level", LEVELS)
def test_the_prefix_cache_is_empty_after_a_wake(client: SamplerClient, level: int):
    prompt = [(7 * i) % 90 + 3 for i in range(96)]

    def cached() -> int:
        return client.sample(prompt, max_tokens=1).reply.cached_tokens

    cached()
    assert cached() > 0
    client.sleep(level)
    client.wake()
    assert cached() == 0
    assert cached() > 0


def test_a_sampler_that_is_killed_while_it_wakes_leaves_no_process(model: Path):
    with sampler_process(model, lease=LEASE) as client:
        client.sleep(2)
        waking = client.send_wake()
        os.kill(client.process.pid, signal.SIGKILL)
        wait_until(lambda: not group_members(client.process.pid))
        with suppress(grpc.RpcError):  # it may have woken just before
            waking.result()
