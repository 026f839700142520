"""One stack, session, full run and LoRA run for the whole suite.

`TANDEM_TEST_SDK` names a folder with another release of the SDK. Tests of methods that it lacks are
left out, and only tests marked `core` need to run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
if other_sdk := os.environ.get("TANDEM_TEST_SDK"):
    assert "tinker" not in sys.modules, "another SDK can only be tested in a session of its own"
    sys.path.insert(0, other_sdk)
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import tinker
from tinker import SamplingClient, ServiceClient, TrainingClient
from tinker.lib.public_interfaces.rest_client import RestClient

from tests.conformance.conform.calls import (
    VARIANTS,
    record_calls,
    rest_client,
    service_client,
    settled,
)
from tests.conformance.conform.claims import claims_of, test_modules
from tests.conformance.conform.surface import surface
from tests.support.sdk import START, rewind, train
from tests.support.stacks import TIED, TestStack, running, write_qwen

PROJECT = "conformance"
SURFACE = surface()
CALLED = record_calls()
FAILED: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "core: also runs on the oldest SDK that we support")
    config.addinivalue_line("markers", "last: runs after all other tests of the suite")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "call" in metafunc.fixturenames:
        metafunc.parametrize("call", VARIANTS, ids=lambda call: call.variant)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out methods that the SDK lacks. Tests about the suite run last."""
    own = [item for item in items if HERE in item.path.parents]
    if not own:
        return
    absent = [item for item in own if other_sdk and not _subjects(item) <= SURFACE]
    config.hook.pytest_deselected(items=absent)
    for item in own:
        # Deprecated methods are tested, too, and warn at every call.
        item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))
    kept = [item for item in own if item not in absent]
    kept.sort(key=lambda item: item.get_closest_marker("last") is not None)
    before = items.index(own[0])
    others = [item for item in items if item not in own]
    items[:] = [*others[:before], *kept, *others[before:]]


def _subjects(item: pytest.Item) -> set[str]:
    """The subjects of a test or its variant."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    variant = params["call"].variant if "call" in params else ""
    claims = claims_of(getattr(item, "function", None))
    return {claim.subject for claim in claims if claim.variant in ("", variant)}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and "conformance" in report.nodeid:
        FAILED.append(report.nodeid)


@pytest.fixture(scope="session")
def called() -> set[str]:
    """Public methods called in this session so far."""
    return CALLED


@pytest.fixture
def failed() -> list[str]:
    return FAILED


@pytest.fixture(scope="session")
def whole_suite(request: pytest.FixtureRequest) -> bool:
    """Whether every test runs, on the newest SDK."""
    config = request.config
    if other_sdk or config.option.keyword or config.option.markexpr:
        return False
    if any("::" in argument for argument in config.args):
        return False
    items = [item for item in request.session.items if HERE in item.path.parents]
    ran = {item.path.stem for item in items}
    return ran == {module.__name__.rpartition(".")[2] for module in test_modules()}


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model in a folder of its name, as in a hub's layout."""
    return write_qwen(tmp_path_factory.mktemp("models") / TIED, seed=1)


@pytest.fixture(scope="package")
def stack(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestStack]:
    data_dir = tmp_path_factory.mktemp("conformance")
    settings = {"trainer_ranks": "1"}
    with running(data_dir, models={TIED: model_path}, settings=settings) as stack:
        endpoint = stack.stack.endpoint
        with pytest.MonkeyPatch.context() as patch:
            # Clients and the command line read these, as in a user's shell.
            patch.setenv("TINKER_BASE_URL", endpoint.url)
            patch.setenv("TINKER_API_KEY", endpoint.api_key)
            patch.setenv("TINKER_TELEMETRY", "1")
            patch.delenv("TINKER_PROJECT_ID", raising=False)
            yield stack


@pytest.fixture(scope="package")
def service(stack: TestStack) -> Iterator[ServiceClient]:
    with service_client(
        user_metadata={"purpose": "conformance"}, project_id=PROJECT, display_name="Shared session"
    ) as service:
        yield service


@pytest.fixture(scope="package")
def session_id(service: ServiceClient) -> str:
    return service.holder.get_session_id()


@pytest.fixture(scope="package")
def runs(service: ServiceClient) -> dict[str, TrainingClient]:
    """A full-parameter run and a LoRA run, each with a first checkpoint."""
    futures = {
        "full": service.create_lora_training_client(f"{TIED}:full", user_metadata={"kind": "full"}),
        "lora": service.create_lora_training_client(
            TIED, rank=4, seed=7, user_metadata={"kind": "lora"}
        ),
    }
    clients = {name: settled(future) for name, future in futures.items()}
    for client in clients.values():
        settled(client.save_state(START))
    return clients


@pytest.fixture
def full(runs: dict[str, TrainingClient]) -> TrainingClient:
    """The full-parameter run before its first step."""
    return rewind(runs["full"])


@pytest.fixture
def lora(runs: dict[str, TrainingClient]) -> TrainingClient:
    """The LoRA run before its first step."""
    return rewind(runs["lora"])


@pytest.fixture(params=["full", "lora"])
def any_run(request: pytest.FixtureRequest, runs: dict[str, TrainingClient]) -> TrainingClient:
    return rewind(runs[request.param])


@pytest.fixture(scope="session")
def base(model_path: Path):
    """The base model in transformers."""
    from tests.support.plain_model import load

    return load(model_path)


@pytest.fixture(scope="package")
def base_sampler(service: ServiceClient) -> SamplingClient:
    """A sampler with the weights of `base`."""
    return settled(service.create_sampling_client(base_model=TIED))


@pytest.fixture(scope="package")
def checkpoints(runs: dict[str, TrainingClient]) -> dict[str, str]:
    """One checkpoint of each kind, all of the LoRA run's trained weights."""
    run = runs["lora"]
    train(run, seed=5, steps=2)
    return {
        "weights": settled(run.save_state("shared", user_metadata={"step": "two"})).path,
        "sampler_weights": settled(run.save_weights_for_sampler("shared")).path,
    }


@pytest.fixture
def rest(stack: TestStack) -> RestClient:
    return rest_client()


@pytest.fixture
def admin(stack: TestStack) -> tinker.AdminClient:
    return tinker.AdminClient()
