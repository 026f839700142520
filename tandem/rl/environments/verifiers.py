"""Environments of the package `verifiers`, whose programs speak OpenAI's chat API.

Such a program asks for completions. A small server on this machine hands its requests to the
loop: the new messages are the observation, and the sampled answer is the completion. So an episode
has exact tokens, on any Tinker server. The program must only add messages to its history.

    def make():
        return vf.load_environment(config)

    train(training, examples(make, limit=500), partial(VerifiersEnvironment, make), config)"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from tandem.rl.environments.episode import Step
from tandem.rl.environments.tools import parse_tool_calls
from tandem.rl.rollouts import Example, Prompt

_CALLS = re.compile(r"<tool_call>.*", re.DOTALL)


def examples(make: Callable[[], Any], *, limit: int | None = None) -> list[Example]:
    """Return the tasks of an environment, the first `limit` of them."""
    return [Example("", {"task": task}) for task in itertools.islice(make().taskset, limit)]


@dataclass
class _Request:
    """A request for a completion. `answer` gets its text."""

    body: Mapping[str, Any]
    answer: asyncio.Future[str] = field(default_factory=asyncio.Future)


class VerifiersEnvironment:
    """One episode of an environment that `make` returns. The reward is that of its first trace.

    The loop decides how to sample: a request's temperature and bounds are not used."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.schemas: Sequence[Mapping[str, object]] = ()
        self._environment = make()
        self._requests: asyncio.Queue[_Request] = asyncio.Queue()
        self._stack = AsyncExitStack()
        self._waiting: _Request | None = None
        self._history: list[Mapping[str, Any]] = []
        self._episode: asyncio.Task[Any] | None = None

    async def reset(self, example: Example) -> Prompt:
        address = await self._serve()
        self._episode = asyncio.create_task(self._run(example.data["task"], address))
        request = await self._next_request()
        if request is None:
            self._last_step()
            raise RuntimeError("the program ended before it asked for a completion")
        self.schemas = request.body.get("tools") or ()
        self._history = _messages_of(request.body)
        return self._history

    async def step(self, answer: str) -> Step:
        assert self._waiting is not None
        self._waiting.answer.set_result(answer)
        request = await self._next_request()
        if request is None:
            return self._last_step()
        messages = _messages_of(request.body)
        old = len(self._history)
        kept = messages[:old] == self._history
        if not kept or [each["role"] == "assistant" for each in messages[old:]].count(True) != 1:
            raise RuntimeError("the program changed its history, so its tokens are not a sequence")
        self._history = messages
        return Step(0.0, messages[old + 1 :])

    async def close(self) -> None:
        """End the program and the server."""
        if self._episode is not None:
            self._episode.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._episode
        await self._stack.aclose()

    def _last_step(self) -> Step:
        assert self._episode is not None
        episode = self._episode.result()
        traces = episode.traces
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
            reason = f"{errors[-1].type}: {errors[-1].message}" if errors else "no reason is known"
            raise RuntimeError(f"the episode failed: {reason}")
        return Step(float(traces[0].reward), fields=dict(traces[0].metrics))

    async def _next_request(self) -> _Request | None:
        """Wait for a request, or for the end of the program."""
        assert self._episode is not None
        asked = asyncio.create_task(self._requests.get())
        try:
            await asyncio.wait([asked, self._episode], return_when=asyncio.FIRST_COMPLETED)
            self._waiting = asked.result() if asked.done() else None
        finally:
            asked.cancel()
        return self._waiting

    async def _run(self, task: Any, address: str) -> Any:
        package = _import("verifiers.v1")
        clients = _import("verifiers.v1.clients")
        context = clients.ModelContext(
            model="policy",
            client=_import("verifiers.v1.configs.client").EvalClientConfig(
                base_url=address, api_key_var="NO_API_KEY"
            ),
            sampling=package.SamplingConfig(),
        )
        async with self._environment.serving():
            [slot] = self._environment.slots(task)
            return await self._environment.run_slot(slot, context)

    async def _serve(self) -> str:
        """Serve completions to this machine, and return the address."""
        web = _import("aiohttp.web")
        secret = secrets.token_urlsafe(16)
        application = web.Application(client_max_size=2**26)
        application.router.add_post(f"/{secret}/v1/chat/completions", self._complete)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        [(_host, port)] = runner.addresses
        return f"http://127.0.0.1:{port}/{secret}/v1"

    async def _complete(self, request: Any) -> Any:
        web = _import("aiohttp.web")
        asked = _Request(await request.json())
        self._requests.put_nowait(asked)
        completion = _completion(await asked.answer, asked.body)
        if not asked.body.get("stream"):
            return web.json_response(completion)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in (*map(json.dumps, _chunks(completion)), "[DONE]"):
            await response.write(f"data: {event}\n\n".encode())
        await response.write_eof()
        return response


def _completion(answer: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer as OpenAI's `chat.completion`."""
    calls = parse_tool_calls(answer) if body.get("tools") else []
    right = [call for call in calls if not call.error]
    message: dict[str, Any] = {"role": "assistant", "content": answer}
    if right:
        message["content"] = _CALLS.sub("", answer).strip() if "<tool_call>" in answer else None
        message["tool_calls"] = [
            {
                "id": f"call_{secrets.token_hex(8)}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in right
        ]
    reason = "tool_calls" if right else "stop"
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": 0,
        "model": body.get("model", "policy"),
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def _chunks(completion: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a completion as the events of a stream: the message, its end, and the usage."""
    [choice] = completion["choices"]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
    shared = {**completion, "object": "chat.completion.chunk", "usage": None}
    return [
        {**shared, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**shared, "choices": [{**choice, "message": None, "delta": {}}]},
        {**shared, "choices": [], "usage": completion["usage"]},
    ]


def _messages_of(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the messages with texts in place of lists of parts."""
    found: list[Mapping[str, Any]] = []
    for message in body["messages"]:
        content = message.get("content")
        if isinstance(content, list):
            if any(part.get("type") != "text" for part in content):
                raise RuntimeError("only text can be sampled: a message has another part")
            content = "".join(part["text"] for part in content)
        found.append({**message, "content": content or ""})
    return found


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            "these environments need another package: pip install verifiers"
        ) from error
