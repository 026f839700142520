"""Tiny models, written once for all tests of this folder. Tests must not change them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.tiny_model import ARCHITECTURES, write_tiny_model


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_tiny_model(root / name, architecture=name) for name in ARCHITECTURES}


@pytest.fixture(scope="session")
def model(models) -> Path:
    return models["qwen3"]


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A fake process group of one rank, for sharded models."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def second() -> Iterator[None]:
    """The second rank of a fake group of two. A process has only one rank, so tests cannot
    alternate."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()
