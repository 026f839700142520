"""Checks an agent: `python -m tandem.agent.check DATA` exits with status 0 if it answers.
Otherwise it prints the reason and exits with status 1.

A container's health check runs it every few seconds, so it imports little."""

from __future__ import annotations

import sys
from pathlib import Path

import grpc

from tandem.agent.address import agent_address
from tandem.v1 import agent_pb2, agent_pb2_grpc

_NO_PROXY = [("grpc.enable_http_proxy", 0)]
_SECONDS = 4.0


def fault(data_dir: Path) -> str | None:
    """Return the reason if the agent does not answer."""
    address = agent_address(data_dir)
    with grpc.insecure_channel(address, options=_NO_PROXY) as channel:
        stub = agent_pb2_grpc.AgentStub(channel)
        try:
            next(stub.Watch(agent_pb2.WatchRequest(), timeout=_SECONDS))
        except grpc.RpcError as error:
            return f"no agent answers at {address}: {error.details()}"
    return None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tandem.agent.check DATA")
    sys.exit(fault(Path(sys.argv[1])))
