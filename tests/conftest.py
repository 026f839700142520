"""What all tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

# Read when torch is imported. In a tiny model threads wait for each other in every operation: with
# two, a step of training takes twenty times the processor time that it takes with one.
os.environ["OMP_NUM_THREADS"] = "1"
# Read when grpc is imported. A child that runs as another user needs a real fork, around which
# gRPC's handlers would stop and start its threads, under gateways of this process that talk then.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# Tests count processes, and most would end before an idle one has been of use.
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

# Gateways of some tests run in this process, and commands are tested by what they print: what is
# logged must go neither between their lines nor into a stream that is closed after a command.
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByModule:
    return ByModule(config, log)


def pytest_testnodedown(node: WorkerController, error: object | None) -> None:
    if error is not None:
        end_with(node, error)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    begin_with_longest(items)


def pytest_collection_finish() -> None:
    """Take what is imported by now out of the garbage collector's sight, as our processes do: each
    collection of all, which moving a trainer's state is, would look through it for 0.6 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_proxies() -> Iterator[None]:
    """Tests talk to this machine, also by the SDK, which would ask the environment's proxy."""
    with without_proxies():
        yield


_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_INTERFACES_BEFORE = {name: os.environ.get(name) for name in _INTERFACES}


@pytest.fixture(autouse=True)
def interfaces_of_collectives() -> Iterator[None]:
    """A rank that is computed in this process says by which interface its collectives go. The
    processes of later tests, some on hosts of their own, must not inherit that."""
    yield
    for name, value in _INTERFACES_BEFORE.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="session", autouse=True)
def grpc_of_all_tests() -> Iterator[None]:
    """Keeps what all channels and servers of grpc.aio in this process share until its tests end.

    gRPC counts them. The one that goes last, in whichever thread, stops the thread that polls,
    destroys their completion queue, takes their reader out of every event loop that ever had one,
    also out of those that other threads run, and shuts gRPC's core down. Programs of ours have one
    loop, and end after that. Here gateways come and go in threads, and the next channel of one
    would start all of it while another thread still ends it.
    """

    async def count_one_more() -> None:
        grpc.aio.init_grpc_aio()  # which binds the running loop

    asyncio.run(count_one_more())
    yield
    grpc.aio.shutdown_grpc_aio()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    if programs() is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    with running_postgres() as server:
        yield server


# Of modules, so that the server starts before a unit test, in which no process may.
@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def each_database(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a module's tests once on each database, of which this is the name."""
    wanted = request.param == "postgresql"
    with used_for_all(request.getfixturevalue("postgres") if wanted else None):
        yield request.param


@pytest.fixture(scope="session", autouse=True)
def database_of_all_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """`TANDEM_TEST_DATABASE=postgresql` runs all gateways of the tests on PostgreSQL."""
    wanted = os.environ.get("TANDEM_TEST_DATABASE") == "postgresql"
    with used_for_all(request.getfixturevalue("postgres") if wanted else None):
        yield
