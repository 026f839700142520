"""tinker-cookbook's capture proxy and its weights tools, unmodified."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import anthropic
import numpy as np
import openai
import pytest
from peft import PeftModel
from tinker import AdamParams, ModelInput, SamplingParams, ServiceClient

from tandem.demo.tiny_model import TinyShape, write_tiny_model
from tests.support.cookbook import output, run_module
from tests.support.cookbook_capture import capture_proxy
from tests.support.plain_model import load, plain_logprobs
from tests.support.sdk import (
    TIMEOUT,
    datum,
    largest_difference,
    prompt_logprobs,
    sequences,
    train,
)
from tests.support.stacks import LLAMA, TIED, TestStack, running

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

AGENT = "models/agent"
SHAPE = TinyShape(hidden=64, layers=2, ffn=128, heads=2, vocabulary=1024, max_length=2048)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
CALLED = {"a": 2, "b": 3}
CALL = f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(CALLED)}}}\n</tool_call>'
SAID = "It is 5."
QUESTION = {"role": "user", "content": "What is 2 + 3?"}


# --- Capture ---------------------------------------------------------------------------------


class Turn(NamedTuple):
    """An agent's turn: the arguments of its tool call or None, its text, and its size."""

    called: dict | None
    text: str
    tokens: int


def openai_turns(address: str, *, streamed: bool) -> list[Turn]:
    """Ask a question, then send the tool's result. Seeded samples, by OpenAI's client."""
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0, timeout=TIMEOUT)
    function = {"name": "add", "description": "Add.", "parameters": SCHEMA}
    call = {"name": "add", "arguments": json.dumps(CALLED)}
    said = [{"id": "call_1", "type": "function", "function": call}]
    result = {"role": "tool", "tool_call_id": "call_1", "content": "5"}
    turns = []
    for messages in ([QUESTION], [QUESTION, {"role": "assistant", "tool_calls": said}, result]):
        asked = {
            "model": "any",
            "messages": messages,
            "tools": [{"type": "function", "function": function}],
            "max_tokens": 64,
            "seed": 5,
        }
        if streamed:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            parts = list(client.chat.completions.create(**asked, **options))
            changes = [choice.delta for part in parts for choice in part.choices]
            text = "".join(change.content or "" for change in changes)
            calls = [call for change in changes for call in change.tool_calls or ()]
            usage = parts[-1].usage
        else:
            answer = client.chat.completions.create(**asked)
            message = answer.choices[0].message
            text, calls, usage = message.content or "", message.tool_calls or (), answer.usage
        called = [json.loads(call.function.arguments) for call in calls]
        turns.append(Turn(called[0] if called else None, text, usage.completion_tokens))
    return turns


def anthropic_turns(address: str, *, streamed: bool) -> list[Turn]:
    """Ask the same as `openai_turns`. The most likely tokens, by Anthropic's client."""
    client = anthropic.Anthropic(base_url=address, api_key="any", max_retries=0, timeout=TIMEOUT)
    use = {"type": "tool_use", "id": "call_1", "name": "add", "input": CALLED}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "5"}
    second = [
        QUESTION,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    turns = []
    for messages in ([QUESTION], second):
        asked = {
            "model": "any",
            "messages": messages,
            "tools": [{"name": "add", "description": "Add.", "input_schema": SCHEMA}],
            "max_tokens": 64,
            "extra_body": {"temperature": 0.0},
        }
        if streamed:
            with client.messages.stream(**asked) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**asked)
        called = [part.input for part in answer.content if part.type == "tool_use"]
        text = "".join(part.text for part in answer.content if part.type == "text")
        turns.append(Turn(called[0] if called else None, text, answer.usage.output_tokens))
    return turns


AGENTS: list[tuple[Callable[..., list[Turn]], bool]] = [
    (openai_turns, False),
    (openai_turns, True),
    (anthropic_turns, False),
    (anthropic_turns, True),
]


@pytest.fixture(scope="module")
def agent_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    write_tiny_model(folder / AGENT, seed=5, shape=SHAPE, tokenizer="qwen")
    return folder


@pytest.fixture(scope="module")
def agent_stack(
    agent_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestStack]:
    models = {AGENT: agent_folder / AGENT}
    settings = {"trainer_ranks": "1"}
    with running(tmp_path_factory.mktemp("data"), models=models, settings=settings) as stack:
        yield stack


def teach(service: ServiceClient, prompts: list[list[int]]) -> str:
    """Teach a model to call the tool after the first prompt, and to talk after the second.

    Returns the path of its weights."""
    training = service.create_lora_training_client(f"{AGENT}:full").result(timeout=240)
    tokenizer = training.get_tokenizer()
    examples = []
    for prompt, answer in zip(prompts, (CALL, SAID), strict=True):
        taught = tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
        weights = np.arange(1, len(prompt) + len(taught)) >= len(prompt)
        examples.append(datum([*prompt, *taught], weights=weights.astype(np.float32)))
    for _ in range(80):
        training.forward_backward(examples, "cross_entropy")
        step = training.optim_step(AdamParams(learning_rate=3e-3, grad_clip_norm=1.0))
    step.result(timeout=TIMEOUT)
    return training.save_weights_for_sampler("taught").result(timeout=TIMEOUT).path


def test_the_capture_proxy_stores_exactly_the_sampled_tokens_and_logprobs(
    agent_stack: TestStack, agent_folder: Path
) -> None:
    with agent_stack.service() as service:
        with capture_proxy(agent_stack, agent_folder, AGENT) as proxy:
            openai_turns(proxy.address("untaught", 0), streamed=False)
            untaught = proxy.rows("untaught", 2)
        path = teach(service, [row["prompt_tokens"] for row in untaught])
        sampling = service.create_sampling_client(model_path=path).result(timeout=TIMEOUT)
        with capture_proxy(agent_stack, agent_folder, AGENT, weights=path) as proxy:

            def converse(number: int) -> list[Turn]:
                agent, streamed = AGENTS[number]
                return agent(proxy.address("taught", number), streamed=streamed)

            with ThreadPoolExecutor(len(AGENTS)) as pool:
                conversations = list(pool.map(converse, range(len(AGENTS))))
            rows = proxy.rows("taught", 2 * len(AGENTS))
        for number, turns in enumerate(conversations):
            assert [(turn.called, turn.text) for turn in turns] == [(CALLED, ""), (None, SAID)]
            stored = [row for row in rows if row["traj_idx"] == number]
            assert [len(row["sampled_tokens"]) for row in stored] == [t.tokens for t in turns]
        end = rows[0]["sampled_tokens"][-1]
        for row in rows:
            known = row["metadata"]["sampling_params"].items()
            params = SamplingParams(stop=[end], **{k: v for k, v in known if v is not None})
            prompt, sampled = row["prompt_tokens"], row["sampled_tokens"]
            again = sampling.sample(ModelInput.from_ints(prompt), 1, params)
            (sequence,) = again.result(timeout=TIMEOUT).sequences
            assert (sequence.tokens, sequence.logprobs) == (sampled, row["logprobs"])
            whole = ModelInput.from_ints([*prompt, *sampled])
            scored = sampling.compute_logprobs(whole).result(timeout=TIMEOUT)
            assert scored[len(prompt) :] == pytest.approx(row["logprobs"], abs=1e-4)


# --- Weights ---------------------------------------------------------------------------------

TOKENS = sequences(5, seed=71)


@pytest.mark.parametrize(
    ("model", "options"), [(TIED, {"train_unembed": False}), (LLAMA, {})], ids=["tied", "untied"]
)
def test_a_model_or_adapter_built_by_the_cookbook_has_the_logprobs_of_the_sampler(
    stack: TestStack,
    service: ServiceClient,
    models: dict[str, Path],
    model: str,
    options: dict[str, bool],
    tmp_path: Path,
) -> None:
    training = service.create_lora_training_client(model, rank=4, seed=3, **options)
    training = training.result(timeout=240)
    train(training, seed=79)
    state = training.save_state("trained").result(timeout=TIMEOUT).path
    sampling = training.save_weights_and_get_sampling_client().result(timeout=TIMEOUT)
    served = prompt_logprobs(sampling, TOKENS)

    done = run_module(
        stack, "tests.support.cookbook_weights", state, models[model], tmp_path, folder=tmp_path
    )

    assert done.returncode == 0, output(done)
    base = load(models[model])
    assert largest_difference(plain_logprobs(base, TOKENS), served) > 0.01
    merged = plain_logprobs(load(tmp_path / "merged"), TOKENS)
    assert largest_difference(merged, served) < 1e-4
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert largest_difference(plain_logprobs(adapted, TOKENS), served) < 1e-4
