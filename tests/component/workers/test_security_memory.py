"""A worker reads nothing from callers without the secret."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest

import tests.support.dummy_worker
from tandem.agent.launcher import ProcessLauncher
from tandem.protocol.channels import worker_channel
from tandem.protocol.worker import MOST_REQUEST_BYTES, SECRET_METADATA_KEY, WorkerHandle, WorkerSpec
from tandem.protocol.worker_server import server_options
from tandem.v1 import trainer_pb2
from tests.support.waiting import until, until_serving

DUMMY = Path(tests.support.dummy_worker.__file__)
MIB = 2**20
METHODS = {
    "one request, one answer": "/tandem.v1.Trainer/ForwardBackward",
    "a stream": "/tandem.v1.Sampler/Sample",
    "health": "/grpc.health.v1.Health/Check",
    "none": "/x/y",
}
JUNK = [
    b"",
    b"\0" * 100,
    b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100,
]


@contextlib.asynccontextmanager
async def worker(folder: Path) -> AsyncIterator[tuple[WorkerHandle, psutil.Process]]:
    launcher = ProcessLauncher(
        data_dir=folder, command=lambda _: [sys.executable, str(DUMMY), "serve"]
    )
    spec = WorkerSpec(
        worker_id="w", kind="trainer", secret="s" * 32, model_name="m", model_path="/m",
        session_id="s",
    )  # fmt: skip
    try:
        handle = await launcher.start(spec)
        await until_serving(handle)
        yield handle, psutil.Process(handle.pid)
    finally:
        await launcher.close()


async def refused(channel: grpc.aio.Channel, path: str, body: bytes, *metadata) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(path)(body, metadata=metadata, timeout=120)
    return caught.value.code()


@pytest.mark.parametrize("path", METHODS.values(), ids=METHODS)
async def test_a_large_request_without_the_secret_is_not_read(tmp_path, path):
    async with worker(tmp_path) as (handle, process), worker_channel(handle) as channel:
        before = process.memory_info().rss
        codes = await asyncio.gather(*(refused(channel, path, bytes(100 * MIB)) for _ in range(3)))
        grown = process.memory_info().rss - before
    assert set(codes) == {grpc.StatusCode.UNAUTHENTICATED}
    assert grown < 40 * MIB, f"{grown / MIB:.0f} MiB"


async def test_many_calls_without_the_secret_fill_no_memory(tmp_path):
    wrong = (SECRET_METADATA_KEY, "x" * 32)
    async with worker(tmp_path) as (handle, process), contextlib.AsyncExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [
            await stack.enter_async_context(
                grpc.aio.insecure_channel(handle.address, options=options)
            )
            for _ in range(4)
        ]
        before = process.memory_info().rss
        body = bytes(2 * MIB)
        calls = (refused(each, "/x/y", body, wrong) for each in channels for _ in range(50))
        codes = await asyncio.gather(*calls)
        grown = process.memory_info().rss - before
    assert set(codes) == {grpc.StatusCode.UNAUTHENTICATED}
    assert grown < 40 * MIB, f"{grown / MIB:.0f} MiB"


async def test_a_request_with_the_secret_may_be_large(tmp_path):
    good = (SECRET_METADATA_KEY, "s" * 32)
    request = trainer_pb2.ForwardBackwardRequest(payload=bytes(100 * MIB)).SerializeToString()
    async with worker(tmp_path) as (handle, _process), worker_channel(handle) as channel:
        # It passed the check, but this worker has no trainer.
        code = await refused(channel, METHODS["one request, one answer"], request, good)
    assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_request_beyond_any_real_size_is_not_read():
    async def answer(request: bytes, context: object) -> bytes:
        return b""

    server = grpc.aio.server(options=server_options("sampler"))
    handlers = {"y": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            body = bytes(MOST_REQUEST_BYTES["sampler"] + 1)
            assert await refused(channel, "/x/y", body) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await channel.unary_unary("/x/y")(bytes(60 * MIB), timeout=120) == b""
    finally:
        await server.stop(None)


async def test_strangers_write_nothing_into_the_log_of_a_worker(tmp_path):
    async with worker(tmp_path) as (handle, _process), worker_channel(handle) as channel:
        log = tmp_path / "logs" / "w.log"
        before = log.read_text()
        host, _, port = handle.address.rpartition(":")
        for sent in JUNK:
            with socket.create_connection((host, int(port)), timeout=10) as stranger:
                stranger.sendall(sent)
                stranger.shutdown(socket.SHUT_WR)
                with contextlib.suppress(OSError):
                    while await asyncio.to_thread(stranger.recv, 4096):
                        pass
        for path in METHODS.values():
            await refused(channel, path, b"")
            await refused(channel, path, b"\xff" * 100, (SECRET_METADATA_KEY, "wrong"))
        assert log.read_text() == before


def closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


async def test_connections_are_bounded(tmp_path):
    async with worker(tmp_path) as (handle, _process):
        host, _, port = handle.address.rpartition(":")
        with contextlib.ExitStack() as stack:
            opened = []
            for _ in range(400):
                opened.append(socket.create_connection((host, int(port)), timeout=10))
                stack.callback(opened[-1].close)
                opened[-1].setblocking(False)
            await until(lambda: sum(map(closed, opened)) >= 140, what="the surplus is closed")
