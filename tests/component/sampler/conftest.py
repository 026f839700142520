"""Shared samplers, because a start takes about ten seconds.

`sampler`: qwen3 with tied embeddings, no adapters. `own`: the same, with the engine in its own
process. `tied_adapters`: the same model with room for two adapters, 16 sequences and 1,300 tokens
(1 MiB). `untied`: llama with a separate head, room for adapters, the engine in its own process.
Tests start and end with the base weights or name a version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sampler_worker import LENGTH, SamplerClient, sampler_process
from tests.support.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sampler")


@pytest.fixture(scope="session")
def model(directory: Path) -> Path:
    return write_tiny_model(directory / "tied", head_dim=32, max_length=LENGTH)


@pytest.fixture(scope="session")
def changed(directory: Path) -> Path:
    return write_tiny_model(directory / "changed", seed=1, head_dim=32, max_length=LENGTH)


@pytest.fixture(scope="session")
def untied_model(directory: Path) -> Path:
    return write_tiny_model(
        directory / "untied", architecture="llama", head_dim=32, max_length=LENGTH
    )


@pytest.fixture(scope="session")
def untied_changed(directory: Path) -> Path:
    return write_tiny_model(
        directory / "untied changed", architecture="llama", seed=1, head_dim=32, max_length=LENGTH
    )


@pytest.fixture(scope="session")
def sampler(model: Path) -> Iterator[SamplerClient]:
    with sampler_process(model) as client:
        yield client


@pytest.fixture(scope="session")
def own(model: Path) -> Iterator[SamplerClient]:
    with sampler_process(model, engine_process="on") as client:
        yield client


@pytest.fixture(params=["sampler", "own"])
def either(request: pytest.FixtureRequest) -> SamplerClient:
    client: SamplerClient = request.getfixturevalue(request.param)
    return client


@pytest.fixture(scope="session")
def tied_adapters(model: Path) -> Iterator[SamplerClient]:
    with sampler_process(
        model, max_lora_rank=5, max_adapters=2, kv_cache_bytes=2**20, max_num_seqs=16
    ) as client:
        yield client


@pytest.fixture(scope="session")
def untied(untied_model: Path) -> Iterator[SamplerClient]:
    with sampler_process(
        untied_model, max_lora_rank=4, max_adapters=2, engine_process="on"
    ) as client:
        yield client
