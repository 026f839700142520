"""Checks an agent: `python -m tandem.agent.check DATA` exits with status 0 if it answers.

A container's health check runs it every few seconds, so it imports little."""

from __future__ import annotations

import sys
from pathlib import Path

import grpc

from tandem.agent.address import agent_address
from tandem.v1 import agent_pb2, agent_pb2_grpc

_NO_PROXY = [("grpc.enable_http_proxy", 0)]
_SECONDS = 4.0


def answers(data_dir: Path) -> bool:
    with grpc.insecure_channel(agent_address(data_dir), options=_NO_PROXY) as channel:
        stub = agent_pb2_grpc.AgentStub(channel)
        try:
            next(stub.Watch(agent_pb2.WatchRequest(), timeout=_SECONDS))
        except grpc.RpcError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(not answers(Path(sys.argv[1])))
