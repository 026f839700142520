from __future__ import annotations

import os
import sys
from collections.abc import Iterator

# Torch reads this at import. In a tiny model, two threads wait for each other in every operation
# and take twenty times the processor time of one.
os.environ["OMP_NUM_THREADS"] = "1"
# gRPC reads this at import. A child that runs as another user needs a real fork. gRPC's fork
# handlers would stop its threads under gateways of this process that are in use.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# Tests count processes, and most end before an idle process is of use.
os.environ["TANDEM_POOL_PROCESSES"] = "0"

import asyncio
import gc

import grpc.aio
import pytest
import structlog
from xdist.remote import Producer
from xdist.workermanage import WorkerController

from tandem.protocol.own_machine import without_proxies
from tests.support.distribution import ByModule, begin_with_longest, end_with
from tests.support.postgres import Postgres, programs, running_postgres, used_for_all

# Some tests run gateways in this process, and others read the output of commands. Logs must go
# neither into that output nor into a stream that is closed after a command.
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByModule:
    return ByModule(config, log)


def pytest_testnodedown(node: WorkerController, error: object | None) -> None:
    if error is not None:
        end_with(node, error)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    begin_with_longest(items)


def pytest_collection_finish() -> None:
    """Freeze imported objects for the garbage collector, as our processes do. Moving a trainer's
    state collects all garbage, and would scan them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_proxies() -> Iterator[None]:
    """The SDK would use the environment's proxy."""
    with without_proxies():
        yield


_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_INTERFACES_BEFORE = {name: os.environ.get(name) for name in _INTERFACES}


@pytest.fixture(autouse=True)
def interfaces_of_collectives() -> Iterator[None]:
    """A rank in this process sets its collectives' interface in the environment. Later tests'
    processes must not inherit it."""
    yield
    for name, value in _INTERFACES_BEFORE.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="session", autouse=True)
def grpc_of_all_tests() -> Iterator[None]:
    """Keeps the shared state of all grpc.aio channels and servers until the tests end.

    After the last channel, gRPC stops its polling thread, removes its reader from every event loop,
    and shuts its core down. Here gateways come and go in threads: one thread's new channel would
    start gRPC again while another thread still ends it."""

    async def count_one_more() -> None:
        grpc.aio.init_grpc_aio()  # binds the running loop

    asyncio.run(count_one_more())
    yield
    grpc.aio.shutdown_grpc_aio()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    if programs() is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    with running_postgres() as server:
        yield server


# Of a module: the server must start before a unit test, which may start no process.
@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def each_database(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a module's tests once on each database. Its value is the database's name."""
    wanted = request.param == "postgresql"
    with used_for_all(request.getfixturevalue("postgres") if wanted else None):
        yield request.param


@pytest.fixture(scope="session", autouse=True)
def database_of_all_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """`TANDEM_TEST_DATABASE=postgresql` runs all gateways of the tests on PostgreSQL."""
    wanted = os.environ.get("TANDEM_TEST_DATABASE") == "postgresql"
    with used_for_all(request.getfixturevalue("postgres") if wanted else None):
        yield
