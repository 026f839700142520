"""Shared tiny models, which tests must not change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_model import ARCHITECTURES, write_tiny_model


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_tiny_model(root / name, architecture=name) for name in ARCHITECTURES}


@pytest.fixture(scope="session")
def model(models) -> Path:
    return models["qwen3"]
