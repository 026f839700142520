"""Tools: typed Python functions that a policy calls in its answers.

An answer calls tools with `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and
Qwen do, or is such a JSON object alone. A wrong call is no failure of the episode: the policy reads
what was wrong in the next observation."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NotRequired, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_json
from typing_extensions import TypedDict

from tandem.rl.environments.chat import are_messages
from tandem.rl.environments.episode import Step
from tandem.rl.rollouts import Example, Prompt

MAX_CALLS = 16
"""Calls of one answer. Further ones are refused."""
MAX_CHARACTERS = 10_000
"""A longer result of a tool is cut."""

_THOUGHT = re.compile(r"<think>.*?(?:</think>|$)", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|$)", re.DOTALL)
_FENCED = re.compile(r"```(?:json)?\s*(\{.*\})\s*```", re.DOTALL)


class LateCall(Exception):
    """A tool or a reward took longer than its timeout."""


@dataclass(frozen=True)
class ToolCall:
    """A call in an answer. `error` says why it cannot be made."""

    name: str = ""
    arguments: Mapping[str, object] | None = None
    error: str = ""


@dataclass(frozen=True)
class Tool:
    """A function with the schema of its arguments. `timeout` is in seconds."""

    name: str
    description: str
    function: Callable[..., object]
    arguments: TypeAdapter[dict[str, Any]]
    timeout: float

    @property
    def schema(self) -> dict[str, object]:
        """The tool as OpenAI's API describes one."""
        parameters = self.arguments.json_schema()
        parameters.pop("title", None)
        for each in parameters.get("properties", {}).values():
            each.pop("title", None)
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": parameters,
            },
        }

    async def use(self, arguments: Mapping[str, object]) -> tuple[str, bool]:
        """Return the result as text, or the error, and whether the call succeeded."""
        try:
            values = self.arguments.validate_python(arguments)
        except ValidationError as error:
            wrong = "; ".join(
                f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}"
                for each in error.errors(include_url=False)
            )
            return f"Error: wrong arguments of {self.name}: {wrong}", False
        try:
            result = await _call(partial(self.function, **values), self.timeout)
        except LateCall:
            return f"Error: {self.name} took longer than {self.timeout:g} s", False
        except Exception as error:  # noqa: BLE001  (a tool's bug is the policy's observation)
            return f"Error: {self.name} failed: {type(error).__name__}: {error}", False
        text = result if isinstance(result, str) else to_json(result, fallback=str).decode()
        return text, True


def make_tool(function: Callable[..., object], *, timeout: float = 10.0) -> Tool:
    """Return a tool from a function's name, docstring and type hints.

    `Annotated[int, Field(description="…")]` describes an argument. An `async` function runs in the
    event loop. Another one runs in a thread, and a late one continues there unseen."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"tool {function.__name__}: argument {name} has no name for JSON")
        if name not in hints:
            raise ValueError(f"tool {function.__name__}: argument {name} has no type")
        needed = parameter.default is parameter.empty
        fields[name] = hints[name] if needed else NotRequired[hints[name]]
    make_type: Any = TypedDict
    arguments = make_type(function.__name__, fields)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")
    return Tool(
        name=function.__name__,
        description=inspect.getdoc(function) or "",
        function=function,
        arguments=TypeAdapter(arguments),
        timeout=timeout,
    )


def parse_tool_calls(answer: str) -> list[ToolCall]:
    """Return the calls in an answer, in order. Text inside `<think>` is no call."""
    # A template may begin the thought, and the answer only ends it.
    text = _THOUGHT.sub("", answer).rpartition("</think>")[2]
    tagged = _CALL.findall(text)
    if tagged:
        return [_parse_call(each) for each in tagged]
    fenced = _FENCED.fullmatch(text.strip())
    plain = fenced.group(1) if fenced else text.strip()
    if plain.startswith("{") and plain.endswith("}"):
        call = _parse_call(plain)
        return [] if call.error else [call]
    return []


def _parse_call(text: str) -> ToolCall:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the tool call is not JSON: {error}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall(error='a tool call is {"name": ..., "arguments": {...}}')
    arguments = found.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI's form: JSON inside JSON
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(found["name"], error=f"the arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(found["name"], error="the arguments are not a JSON object")
    return ToolCall(found["name"], arguments)


Reward = Callable[[Example, str], float | Awaitable[float]]


class ToolEnvironment:
    """An episode in which the policy calls tools until it answers without a call.

    `reward(example, answer)` scores that answer, or the answer of the last turn. Override
    `score` if the reward depends on the calls: `calls` counts successful ones by name. A chat gets
    the results as messages of the role "tool". If its template knows no such role, `role="user"`
    gives `<tool_response>` blocks in one message. A prompt of text gets the blocks."""

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., object]],
        *,
        reward: Reward | None = None,
        role: Literal["tool", "user"] = "tool",
        max_turns: int = 8,
        reward_timeout: float = 60.0,
    ) -> None:
        made = [each if isinstance(each, Tool) else make_tool(each) for each in tools]
        self.tools = {tool.name: tool for tool in made}
        if len(self.tools) < len(made):
            raise ValueError("two tools have one name")
        self.schemas = [tool.schema for tool in made]
        self.calls: dict[str, int] = {}
        self.errors = 0
        self._reward, self._role = reward, role
        self._max_turns, self._reward_timeout = max_turns, reward_timeout
        self._turns = 0

    async def reset(self, example: Example) -> Prompt:
        self.example, self._turns, self.errors = example, 0, 0
        self.calls = {}
        return example.prompt

    async def step(self, answer: str) -> Step:
        self._turns += 1
        calls = parse_tool_calls(answer)
        if not calls or self._turns >= self._max_turns:
            reward = await self.score(self.example, answer)
            fields = {"tool_calls": sum(self.calls.values()), "tool_errors": self.errors}
            return Step(reward, fields=fields)
        return Step(
            0.0, self._observation([await self._result(*each) for each in enumerate(calls)])
        )

    async def score(self, example: Example, answer: str) -> float:
        """Return the reward of the episode."""
        if self._reward is None:
            raise ValueError("a ToolEnvironment needs `reward`, or a method `score`")
        reward = await _call(partial(self._reward, example, answer), self._reward_timeout)
        if reward is None:
            raise ValueError("the reward of the episode failed")
        return float(reward)

    async def _result(self, number: int, call: ToolCall) -> tuple[str, str]:
        """Return the tool's name and its reply."""
        tool = self.tools.get(call.name)
        if number >= MAX_CALLS:
            text, done = f"Error: an answer has at most {MAX_CALLS} tool calls", False
        elif call.error or call.arguments is None:
            text, done = f"Error: {call.error}", False
        elif tool is None:
            text, done = f"Error: no tool {call.name!r}; known: {', '.join(self.tools)}", False
        else:
            text, done = await tool.use(call.arguments)
        if done:
            self.calls[call.name] = self.calls.get(call.name, 0) + 1
        else:
            self.errors += 1
        return call.name, _cut(text)

    def _observation(self, results: Sequence[tuple[str, str]]) -> Prompt:
        prompt = self.example.prompt
        chat = are_messages(prompt)
        if chat and self._role == "tool":
            return [{"role": "tool", "name": name, "content": text} for name, text in results]
        blocks = (f"<tool_response>\n{text}\n</tool_response>" for _name, text in results)
        text = "\n".join(blocks)
        return [{"role": self._role, "content": text}] if chat else f"\n{text}\n"


async def _call(function: Callable[[], Any], timeout: float) -> Any:
    """Call a function: in the event loop if it is a coroutine's, else in a thread of its own.

    A thread cannot be ended. It is a daemon, so a late one blocks neither others nor the exit."""
    inner = function.func if isinstance(function, partial) else function
    try:
        async with asyncio.timeout(timeout) as limit:
            if inspect.iscoroutinefunction(inner):
                return await function()
            result = await _in_thread(function)
            return await result if inspect.isawaitable(result) else result
    except TimeoutError:
        if limit.expired():
            raise LateCall from None
        raise


async def _in_thread(function: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def finish(result: Any, failure: BaseException | None) -> None:
        if not done.done():
            done.set_result((result, failure))

    def work() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001  (the caller gets it, also `SystemExit`)
            failure = error
        with suppress(RuntimeError):  # the loop was closed before a late call ended
            loop.call_soon_threadsafe(finish, result, failure)

    threading.Thread(target=work, daemon=True, name="tandem-tool").start()
    result, failure = await done
    if isinstance(failure, Exception):
        raise failure
    if failure is not None:
        raise RuntimeError(f"it ended with {type(failure).__name__}")
    return result


def _cut(text: str) -> str:
    over = len(text) - MAX_CHARACTERS
    return text if over <= 0 else f"{text[:MAX_CHARACTERS]}\n({over} more characters)"
