"""One stack, session, and training run per model for most tests."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

os.environ["TINKER_TELEMETRY"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from tinker import ServiceClient, TrainingClient

from tests.support.processes import Process, marked
from tests.support.sdk import rewind, start_runs
from tests.support.stacks import LLAMA, TIED, TestStack, running, write_llama, write_qwen
from tests.support.waiting import wait_until


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    mark = f"session-{uuid.uuid4().hex}"
    os.environ["TANDEM_TEST_SESSION_MARK"] = mark
    yield
    del os.environ["TANDEM_TEST_SESSION_MARK"]
    try:
        wait_until(lambda: not _left(mark), what="every process of the tests has ended")
    except AssertionError as error:
        raise AssertionError(f"{error}: {_left(mark)}") from None


def _left(mark: str) -> list[Process]:
    """Without processes that this one keeps until it ends: multiprocessing's, and that of custom
    losses, which trainers in this process share."""
    return [
        each
        for each in marked(mark)
        if "multiprocessing.resource_tracker" not in each.command
        and not (each.parent == os.getpid() and "tandem.custom_losses.process" in each.command)
    ]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {TIED: write_qwen(folder / "tied", seed=1), LLAMA: write_llama(folder / "llama", seed=3)}


@pytest.fixture(scope="session")
def stack(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestStack]:
    """One rank, and a payload limit that a test can exceed."""
    settings = {"trainer_ranks": "1", "max_payload_bytes": str(2**20)}
    with running(tmp_path_factory.mktemp("data"), models=models, settings=settings) as stack:
        yield stack


@pytest.fixture(scope="session")
def service(stack: TestStack) -> Iterator[ServiceClient]:
    with stack.service() as service:
        yield service


@pytest.fixture(scope="session")
def runs(service: ServiceClient) -> dict[str, TrainingClient]:
    """A run for each model, with a first checkpoint."""
    return start_runs(service, TIED, LLAMA)


@pytest.fixture(params=[TIED, LLAMA])
def any_run(request: pytest.FixtureRequest, runs: dict[str, TrainingClient]) -> TrainingClient:
    """Tied and untied weights, two architectures, before the first step."""
    return rewind(runs[request.param])


@pytest.fixture
def run(runs: dict[str, TrainingClient]) -> TrainingClient:
    """The tied model before its first step."""
    return rewind(runs[TIED])
