"""Supervised fine-tuning on answers, with `cross_entropy`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tandem.rl.environments.chat import Renderer, are_messages
from tandem.rl.objectives import Floats, datum
from tandem.rl.policy import Training
from tandem.rl.report import Tracked
from tandem.rl.rollouts import Example, Message
from tandem.rl.supervised import Fitted, SFTConfig, fit, open_client, tokenizer_of
from tandem.rl.tasks import blocking

if TYPE_CHECKING:
    from tinker import types


async def sft_async(
    training: Training,
    examples: Sequence[Example],
    config: SFTConfig,
    *,
    tokenizer: Any = None,
    evaluation: Sequence[Example] = (),
    tracked: Tracked | Literal[False] | None = None,
) -> Fitted:
    """Train a model to give the answers of examples.

    An example has a prompt and `data["answer"]`, or its prompt is a dialogue: then each message of
    the assistant is an answer to the messages before it. `training` is a training client, or
    `resumable(service, model)`. Steps and evaluations have the `loss` of an answer's token.
    Example: `Example("2+3=", {"answer": "5"})`."""
    policy, state = await open_client(training, config, rows=len(examples))
    renderer = Renderer(await tokenizer_of(policy, tokenizer))
    return await fit(
        policy,
        _Answers(examples, renderer),
        config,
        state=state,
        evaluation=_Answers(evaluation, renderer) if evaluation else None,
        tracked=tracked,
    )


sft = blocking(sft_async)


class _Answers:
    """Each batch's loss is the mean over the tokens of its answers."""

    loss = "cross_entropy"
    settings: Mapping[str, float | str] = {}

    def __init__(self, examples: Sequence[Example], renderer: Renderer) -> None:
        self._examples, self._renderer = examples, renderer

    def __len__(self) -> int:
        return len(self._examples)

    async def data(self, rows: Sequence[int]) -> list[types.Datum]:
        pairs = [pair for row in rows for pair in answers_of(self._examples[row], self._renderer)]
        total = sum(len(answer) for _prompt, answer in pairs)
        return [
            datum([*prompt, *answer], weights=weights_of(prompt, answer) / total)
            for prompt, answer in pairs
        ]

    def values(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {"loss": metrics["loss:sum"]}


def answers_of(example: Example, renderer: Renderer) -> list[tuple[list[int], list[int]]]:
    """Return the prompts and answers of an example, as token ids.

    Raises `ValueError` if it has no answer."""
    prompt = example.prompt
    if "answer" in example.data:
        return [(renderer.prompt(prompt), renderer.answer(prompt, str(example.data["answer"])))]
    if not are_messages(prompt):
        raise ValueError(
            f"the example {prompt!r:.80} has no answer: set data['answer'], or give a dialogue"
        )
    found = [
        (renderer.prompt(prompt[:place]), renderer.answer(prompt[:place], _content(message)))
        for place, message in enumerate(prompt)
        if place and message.get("role") == "assistant"
    ]
    if not found:
        raise ValueError("a dialogue without a message of the assistant has nothing to train")
    return found


def _content(message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise ValueError(f"the content of a message of the assistant is no text: {content!r:.80}")
    return content


def weights_of(prompt: Sequence[int], answer: Sequence[int]) -> Floats:
    """Return 1 for each token of the answer, and 0 for the prompt's, from the second token on."""
    return np.array([0.0] * len(prompt) + [1.0] * len(answer))[1:]
