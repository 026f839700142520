"""Fixtures of the gateway's unit tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.gateway.sampler_world import WHOLE_MACHINE, World


@pytest.fixture
def new_world(tmp_path: Path) -> Callable[..., World]:
    """Return a function that makes a world with a sampler of several engines."""

    def new(replicas: int = 2, groups=WHOLE_MACHINE, **settings) -> World:
        return World(tmp_path, settings, replicas=replicas, groups=groups)

    return new
