"""A taskset of `verifiers`, and a program that solves its tasks with a tool."""

from __future__ import annotations

import json

import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

ADD = {
    "type": "function",
    "function": {"name": "add", "strict": True, "parameters": {"type": "object"}},
}


class AdderData(vf.TaskData):
    answer: int


class AdderTask(vf.Task[AdderData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.metric
    async def asked(self, trace) -> float:
        return float(trace.num_turns)


class AdderTaskset(vf.Taskset[AdderTask, vf.TasksetConfig]):
    def load(self):
        for left in range(5):
            yield AdderTask(AdderData(prompt=f"{left} + 1", answer=left + 1), self.config.task)


class AdderConfig(vf.HarnessConfig):
    stream: bool = False
    rewrites: bool = False
    crashes: bool = False


class AdderHarness(vf.Harness[AdderConfig]):
    """Asks until an answer has no call. `rewrites` drops the first message after each answer."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        messages = [{"role": "user", "content": [{"type": "text", "text": data.prompt}]}]
        while True:
            message = await self.ask(client, ctx.model, messages)
            calls = message.get("tool_calls") or []
            if not calls:
                return ProgramResult(exit_code=0, stdout="", stderr="")
            if self.config.crashes:
                raise RuntimeError("the program is broken")
            messages = [*messages[self.config.rewrites :], message]
            for call in calls:
                numbers = json.loads(call["function"]["arguments"])
                reply = {"role": "tool", "tool_call_id": call["id"], "content": ""}
                messages.append({**reply, "content": str(numbers["left"] + numbers["right"])})

    async def ask(self, client, model, messages):
        shared = {"model": model, "messages": messages, "tools": [ADD]}
        if not self.config.stream:
            completion = await client.chat.completions.create(**shared)
            return completion.choices[0].message.model_dump(exclude_none=True)
        async with client.chat.completions.stream(**shared) as stream:
            completion = await stream.get_final_completion()
        return completion.choices[0].message.model_dump(exclude_none=True, exclude={"parsed": True})


__all__ = ["AdderHarness", "AdderTaskset"]
