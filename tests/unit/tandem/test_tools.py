"""A policy's calls of tools, right and wrong ones."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from tandem.rl.environments import (
    Renderer,
    ToolEnvironment,
    make_tool,
    parse_tool_calls,
    rollout,
)
from tandem.rl.environments.tools import MAX_CALLS, MAX_CHARACTERS
from tandem.rl.rollouts import Example
from tests.support.chat_tokenizers import chat_tokenizer
from tests.support.scripted_policy import ScriptedPolicy, turn

CHAT = Example([{"role": "user", "content": "Q"}])


def add(left: int, right: Annotated[int, Field(description="The second number.")] = 1) -> int:
    """Add two numbers."""
    return left + right


async def slow(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


def fails() -> None:
    raise KeyError("no such thing")


def exits() -> None:
    sys.exit(3)


def times_out_inside() -> None:
    raise TimeoutError("the socket was late")


def long() -> str:
    return "x" * (MAX_CHARACTERS + 5)


class Place(BaseModel):
    x: int


def move(to: Place, how: Literal["walk", "run"], json: bool = False) -> dict:
    return {"x": to.x, "how": how, "json": json}


TOOLS = [add, make_tool(slow, timeout=0.05), fails, exits, times_out_inside, long, move]


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def replies(answer: str) -> list[str]:
    environment = ToolEnvironment(TOOLS, reward=lambda example, answer: 1.0)
    await environment.reset(CHAT)
    step = await environment.step(answer)
    return [message["content"] for message in step.observation]


def test_the_schema_follows_from_the_signature_and_the_docstring():
    assert make_tool(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "left": {"type": "integer"},
                    "right": {"type": "integer", "description": "The second number."},
                },
                "required": ["left"],
                "additionalProperties": False,
            },
        },
    }


def test_a_function_that_json_cannot_call_is_refused():
    def untyped(x):
        return x

    def many(*numbers: int) -> int:
        return sum(numbers)

    with pytest.raises(ValueError, match="x has no type"):
        make_tool(untyped)
    with pytest.raises(ValueError, match="numbers has no name"):
        make_tool(many)
    with pytest.raises(ValueError, match="one name"):
        ToolEnvironment([add, add])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (call("add", left=2, right=3), ["5"]),
        (call("add", left="2"), ["3"]),
        (f"I add. {call('add', left=1)}{call('add', left=2)} Then?", ["2", "3"]),
        ('{"name": "add", "arguments": {"left": 4}}', ["5"]),
        ('```json\n{"name": "add", "arguments": {"left": 4}}\n```', ["5"]),
        ('<tool_call>{"name": "add", "arguments": "{\\"left\\": 4}"}</tool_call>', ["5"]),
        ('<tool_call>{"name": "add", "arguments": {"left": 4}}', ["5"]),
        (f"<think>{call('fails')}</think>{call('add', left=1)}", ["2"]),
        (f"so {call('fails')}</think>{call('add', left=1)}", ["2"]),
        (f"{call('add', left=1)}<think>{call('fails')}", ["2"]),
        (call("move", to={"x": 2}, how="run"), ['{"x":2,"how":"run","json":false}']),
    ],
)
async def test_calls_in_an_answer_are_made_in_order(answer, expected):
    assert await replies(answer) == expected


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("<tool_call>add(1, 2)</tool_call>", "is not JSON"),
        ("<tool_call>" + "[" * 100_000, "is not JSON"),
        ("<tool_call>[1]</tool_call>", 'a tool call is {"name"'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "not a JSON object"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "arguments are not JSON"),
        (call("subtract"), "no tool 'subtract'; known: add, slow"),
        (call("add"), "wrong arguments of add: left: Field required"),
        (call("add", left="two"), "left: Input should be a valid integer"),
        (call("add", left=1, third=2), "third: Extra inputs are not permitted"),
        (call("move", to={"x": "?"}, how="fly"), "to.x: Input"),
        (call("slow", seconds=60), "slow took longer than 0.05 s"),
        (call("fails"), "fails failed: KeyError"),
        (call("exits"), "it ended with SystemExit"),
        (call("times_out_inside"), "the socket was late"),
    ],
)
async def test_a_wrong_call_becomes_an_observation(answer, message):
    [reply] = await replies(answer)
    assert reply.startswith("Error: ")
    assert message in reply


async def test_a_late_function_in_a_thread_does_not_hold_the_episode():
    started, release = threading.Event(), threading.Event()

    def waits() -> str:
        """Wait."""
        started.set()
        release.wait()
        return "late"

    environment = ToolEnvironment([make_tool(waits, timeout=0.05)])
    await environment.reset(CHAT)
    step = await environment.step(call("waits"))
    assert started.is_set()
    assert "took longer" in step.observation[0]["content"]
    release.set()


async def test_results_and_the_number_of_calls_are_bounded():
    [reply] = await replies(call("long"))
    assert reply.endswith("(5 more characters)")
    found = await replies(call("add", left=1) * (MAX_CALLS + 2))
    assert found[:MAX_CALLS] == ["2"] * MAX_CALLS
    assert found[MAX_CALLS:] == [f"Error: an answer has at most {MAX_CALLS} tool calls"] * 2


def test_text_without_a_call_is_an_answer():
    for text in ("5", "{5}", '{"answer": 5}', '{"name": 5}', "<think><tool_call>{}"):
        assert parse_tool_calls(text) == []


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_the_reward_scores_the_answer_without_calls(kind):
    def right(example, answer):
        return float(answer == "5")

    async def right_later(example, answer):
        return right(example, answer)

    environment = ToolEnvironment([add], reward=right if kind == "sync" else right_later)
    await environment.reset(CHAT)
    assert (await environment.step(call("add", left=2, right=3))).reward == 0.0
    assert (await environment.step(call("add"))).observation is not None
    step = await environment.step("5")
    assert (step.reward, step.observation) == (1.0, None)
    assert step.fields == {"tool_calls": 1, "tool_errors": 1}


async def test_the_last_turn_is_scored_with_or_without_a_call():
    environment = ToolEnvironment([add], reward=lambda example, answer: 0.25, max_turns=2)
    await environment.reset(CHAT)
    assert (await environment.step(call("add", left=1))).observation is not None
    step = await environment.step(call("add", left=1))
    assert (step.reward, step.observation) == (0.25, None)


async def test_a_failed_reward_is_no_reward_of_zero():
    async def dropped(example, answer):
        return None

    environment = ToolEnvironment([add], reward=dropped)
    await environment.reset(CHAT)
    with pytest.raises(ValueError, match="the reward of the episode failed"):
        await environment.step("5")


async def test_observations_fit_the_prompt():
    block = "<tool_response>\n2\n</tool_response>"

    async def observation(prompt, **options):
        environment = ToolEnvironment([add], **options)
        await environment.reset(Example(prompt))
        return (await environment.step(call("add", left=1))).observation

    assert await observation(CHAT.prompt) == [{"role": "tool", "name": "add", "content": "2"}]
    assert await observation(CHAT.prompt, role="user") == [{"role": "user", "content": block}]
    assert await observation("Q") == f"\n{block}\n"


class Sums(ToolEnvironment):
    """The reward is 1 for the right sum after a call of the tool."""

    def __init__(self) -> None:
        super().__init__([add])

    async def score(self, example: Example, answer: str) -> float:
        return float(answer == example.data["answer"] and "add" in self.calls)


@pytest.mark.parametrize(("uses_the_tool", "reward"), [(True, 1.0), (False, 0.0)])
async def test_a_reward_may_depend_on_the_calls(uses_the_tool, reward):
    tokenizer = chat_tokenizer("chatml")
    example = Example(CHAT.prompt, {"answer": "It is 7."})
    texts = [call("add", left=3, right=4)] * uses_the_tool + ["It is 7."]
    policy = ScriptedPolicy([turn(tokenizer.encode(f"{text}<|im_end|>")) for text in texts])

    found = await rollout(
        Sums(),
        example,
        sample=policy.sample,
        renderer=Renderer(tokenizer),
        max_tokens=200,
    )

    assert (found.reward, found.text) == (reward, "It is 7.")
    shown = tokenizer.decode(list(policy.prompts[-1]))
    assert '"name": "add"' in shown  # the schema
    assert ("<|im_start|>tool\n7<|im_end|>" in shown) == uses_the_tool
