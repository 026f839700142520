"""No method of a worker answers without the secret."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from sampler_service.vllm.environment import sampler_environment
from tandem.protocol.worker import SECRET_METADATA_KEY
from tandem.protocol.worker_server import SecretInterceptor
from tandem.v1 import sampler_pb2, sampler_pb2_grpc, trainer_pb2, trainer_pb2_grpc

SECRET = "the secret of this worker"
METHODS = [
    method
    for file in (trainer_pb2, sampler_pb2, health_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
WRONG = {
    "none": (),
    "empty": ((SECRET_METADATA_KEY, ""),),
    "another": ((SECRET_METADATA_KEY, "x" * len(SECRET)),),
    "cut": ((SECRET_METADATA_KEY, SECRET[:-1]),),
    "longer": ((SECRET_METADATA_KEY, SECRET + " x"),),
    "in another case": ((SECRET_METADATA_KEY, SECRET.upper()),),
    "under another name": (("authorization", f"Bearer {SECRET}"), ("x-api-key", SECRET)),
    "good and bad": ((SECRET_METADATA_KEY, SECRET), (SECRET_METADATA_KEY, "bad")),
}


class Open(trainer_pb2_grpc.TrainerServicer):
    """Answers everybody, because the interceptor is tested."""

    async def Describe(self, request, context):
        return trainer_pb2.DescribeTrainerReply(architecture="open")


@contextlib.asynccontextmanager
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[SecretInterceptor(SECRET)])
    trainer_pb2_grpc.add_TrainerServicer_to_server(Open(), server)
    sampler_pb2_grpc.add_SamplerServicer_to_server(sampler_pb2_grpc.SamplerServicer(), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
            yield opened
    finally:
        await server.stop(None)


async def no_requests() -> AsyncIterator[object]:
    """Keeps a stream open. A send would hide the status of a call that the server has ended."""
    await asyncio.Event().wait()
    yield


async def call(opened: grpc.aio.Channel, method: MethodDescriptor, metadata) -> grpc.StatusCode:
    request = message_factory.GetMessageClass(method.input_type)()
    path = f"/{method.containing_service.full_name}/{method.name}"
    parse = message_factory.GetMessageClass(method.output_type).FromString
    if method.client_streaming:
        make = opened.stream_stream
    else:
        make = opened.unary_stream if method.server_streaming else opened.unary_unary
    calling = make(path, type(request).SerializeToString, parse)(
        no_requests() if method.client_streaming else request, metadata=metadata, timeout=60
    )
    try:
        if method.server_streaming:
            await calling.read()
        else:
            await calling
    except grpc.aio.AioRpcError as error:
        assert SECRET not in str(error)
        return error.code()
    return grpc.StatusCode.OK


def test_the_services_are_those_of_the_workers():
    names = {method.containing_service.full_name for method in METHODS}
    assert names == {"tandem.v1.Trainer", "tandem.v1.Sampler", "grpc.health.v1.Health"}
    assert {each.name for each in METHODS if each.client_streaming} == {"Sample"}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
async def test_every_method_refuses_every_wrong_secret(wrong):
    async with channel() as opened:
        found = {method.full_name: await call(opened, method, wrong) for method in METHODS}
    assert set(found.values()) == {grpc.StatusCode.UNAUTHENTICATED}, found


async def test_methods_that_there_are_not_say_no_more():
    async with channel() as opened:
        for path in ("/tandem.v1.Trainer/Admin", "/grpc.reflection.v1.ServerReflection/X", "/x/y"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await opened.unary_unary(path)(b"", timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_the_right_secret_opens_every_door():
    good = ((SECRET_METADATA_KEY, SECRET),)
    async with channel() as opened:
        found = {method.full_name: await call(opened, method, good) for method in METHODS}
    assert grpc.StatusCode.UNAUTHENTICATED not in found.values()
    assert found["tandem.v1.Trainer.Describe"] is grpc.StatusCode.OK


def test_a_worker_without_a_secret_is_not_started():
    with pytest.raises(AssertionError):
        SecretInterceptor("")


def test_an_engine_listens_on_this_machine_alone():
    environment = sampler_environment({"GLOO_SOCKET_IFNAME": "eth0"}, cpu=True, library=None)
    assert environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == "lo"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
