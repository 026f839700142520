"""The warm-up: trains random weights into a policy that is right about half of the time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.demo.addition import Tokenizer, all_problems, imperfect_label
from tandem.demo.configuration import WarmUp
from tandem.demo.data import supervised_datum
from tandem.rl import linear_decay

if TYPE_CHECKING:
    import tinker

_AHEAD = 4
"""Updates in flight, enough to hide the round trip."""


def warm_up(
    client: tinker.TrainingClient,
    tokenizer: Tokenizer,
    *,
    eos: int,
    seed: int,
    configuration: WarmUp,
    progress: Callable[[int, float], None],
) -> None:
    """`progress` gets each step and its mean loss."""
    rng = random.Random(seed)
    problems = all_problems()
    prompts = {problem: tokenizer.encode(problem.prompt) for problem in problems}
    pending: deque[tuple[int, tinker.APIFuture, tinker.APIFuture]] = deque()

    def finish_one() -> None:
        step, computed, stepped = pending.popleft()
        loss = computed.result().metrics["loss:sum"]
        stepped.result()
        progress(step, loss)

    for step in range(1, configuration.steps + 1):
        batch = [rng.choice(problems) for _ in range(configuration.batch)]
        labels = [[*tokenizer.encode(imperfect_label(problem, rng)), eos] for problem in batch]
        weight = 1.0 / sum(len(label) for label in labels)
        data = [
            supervised_datum(prompts[problem], label, weight=weight)
            for problem, label in zip(batch, labels, strict=True)
        ]
        rate = linear_decay(
            step=step,
            steps=configuration.steps,
            peak=configuration.learning_rate,
            final=configuration.final_learning_rate,
        )
        adam = configuration.adam(rate)
        pending.append(
            (step, client.forward_backward(data, "cross_entropy"), client.optim_step(adam))
        )
        if len(pending) >= _AHEAD:
            finish_one()
    while pending:
        finish_one()
