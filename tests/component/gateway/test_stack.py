"""The stack restarts a gateway or an agent that ends by itself."""

from __future__ import annotations

import os
import signal

import grpc
import pytest

from tandem.agent.address import agent_address
from tandem.errors import InvalidRequest, ServerError
from tandem.stack import Stack, answers
from tandem.v1 import agent_pb2, agent_pb2_grpc
from tests.support.waiting import PATIENCE, wait_until


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    return []


@pytest.fixture(scope="module")
def stack(tmp_path_factory, sentences):
    data_dir = tmp_path_factory.mktemp("stack")
    with Stack(data_dir=data_dir, settings={"port": "0"}, tell=sentences.append) as stack:
        yield stack


@pytest.fixture
def said(sentences) -> list[str]:
    """The stack's sentences in this test."""
    sentences.clear()
    return sentences


def another(stack: Stack, old: int) -> bool:
    return stack.endpoint.pid != old and answers(stack.endpoint)


def test_a_killed_gateway_comes_back_on_its_port_and_its_agent_has_stayed(stack, said):
    before, agent = stack.endpoint, stack.agent_process.pid
    os.kill(before.pid, signal.SIGKILL)
    wait_until(lambda: another(stack, before.pid), what="another gateway answers")
    assert stack.endpoint.url == before.url
    assert stack.endpoint.api_key == before.api_key
    assert stack.agent_process.pid == agent
    (sentence,) = said
    assert sentence.startswith("the gateway ended by itself and is started again: it was killed by")


def agent_pid(stack: Stack) -> int:
    """The answering agent's pid. Waits for an answer."""
    with grpc.insecure_channel(agent_address(stack.data_dir)) as channel:
        request = agent_pb2.DescribeAgentRequest()
        stub = agent_pb2_grpc.AgentStub(channel)
        return stub.Describe(request, wait_for_ready=True, timeout=PATIENCE).pid


def test_a_killed_agent_comes_back_and_its_gateway_has_stayed(stack, said):
    gateway, agent = stack.endpoint.pid, agent_pid(stack)
    assert agent == stack.agent_process.pid
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: said, what="the stack has noticed it")
    assert agent_pid(stack) not in (agent, gateway)
    assert said[0].startswith("the agent ended by itself and is started again: it was killed by")
    assert stack.endpoint.pid == gateway
    wait_until(lambda: answers(stack.endpoint))


def test_one_that_stands_still_is_killed_and_comes_back(tmp_path):
    said = []
    settings = {"port": "0", "worker_unresponsive_timeout": "20"}
    with Stack(data_dir=tmp_path, settings=settings, tell=said.append) as stack:
        before, agent = stack.endpoint, agent_pid(stack)
        for pid in (before.pid, agent):
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: another(stack, before.pid), what="another gateway answers")
        assert agent_pid(stack) != agent
    for name in ("gateway", "agent"):
        why = f"the {name} ended by itself and is started again: it answered nothing for 20 s"
        assert any(sentence.startswith(why) for sentence in said), said


def test_a_stack_whose_logs_were_removed_goes_on_and_stops_like_any_other(tmp_path):
    with Stack(data_dir=tmp_path, settings={"port": "0"}) as stack:
        before, log = stack.endpoint, stack.log_path
        log.unlink()
        os.kill(before.pid, signal.SIGKILL)
        wait_until(lambda: another(stack, before.pid), what="another gateway answers")
        log.unlink()
        log.with_name("agent.log").unlink()
    assert (stack.process.returncode, stack.agent_process.returncode) == (0, 0)


def test_a_second_stack_on_the_same_data_directory_is_refused(stack):
    with (
        pytest.raises(InvalidRequest, match=f"Tandem is up at {stack.endpoint.url} already"),
        Stack(data_dir=stack.data_dir, settings={"port": "0"}),
    ):
        pass
    wait_until(lambda: answers(stack.endpoint), what="the first has stayed")


def test_a_gateway_that_cannot_start_again_ends_the_stack_with_its_reason(tmp_path):
    with Stack(data_dir=tmp_path, settings={"port": "0"}) as stack:
        gateway = stack.endpoint.pid
        (tmp_path / "gateway.lock").unlink()
        (tmp_path / "gateway.lock").mkdir()
        os.kill(gateway, signal.SIGKILL)
        with pytest.raises(
            ServerError, match=r"the gateway ended .* times .*gateway\.lock: Is a dir"
        ):
            stack.wait()
