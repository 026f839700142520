"""A bandit for objectives: a table of logits is the policy, and the server's losses train it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tinker import types

from tandem.rl.objectives import Objective, Reference
from tandem.rl.rollouts import Example, Group, Rollout, Turn
from tests.support.losses.cases import Data, compute
from trainer_service.losses import LOSSES

START = 0
RIGHT = (2, 3)
VOCABULARY = 4


class Table:
    """A policy whose next token depends on the last one alone. `logits` is [token, next token]."""

    def __init__(self, logits: torch.Tensor | None = None) -> None:
        start = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
        self.logits = (start if logits is None else logits.clone()).requires_grad_(True)
        self._adam = torch.optim.Adam([self.logits], lr=0.1)

    @classmethod
    def that_knows(cls) -> Table:
        logits = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
        for before, after in zip((START, *RIGHT[:-1]), RIGHT, strict=True):
            logits[before, after] = 5.0
        return cls(logits)

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """Log probabilities of a sequence [tokens - 1], from the second token on."""
        rows = torch.log_softmax(self.logits[list(tokens[:-1])], dim=-1)
        return rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]

    @property
    def right(self) -> float:
        """The probability of the right answer."""
        with torch.no_grad():
            return float(self.logprobs((START, *RIGHT)).sum().exp())

    def sample(self, rng: np.random.Generator) -> Rollout:
        tokens = [START]
        with torch.no_grad():
            for _ in RIGHT:
                chances = torch.softmax(self.logits[tokens[-1]], dim=-1).numpy()
                tokens.append(int(rng.choice(VOCABULARY, p=chances)))
            logprobs = self.logprobs(tokens).tolist()
        reward = float(tuple(tokens[1:]) == RIGHT)
        turn = Turn(
            observation=[START], tokens=tokens[1:], logprobs=logprobs, steps=[0] * len(RIGHT)
        )
        return Rollout(turns=[turn], reward=reward)

    def group(self, rng: np.random.Generator, number: int, size: int = 8) -> Group:
        return Group(
            number=number, example=Example(""), rollouts=[self.sample(rng) for _ in range(size)]
        )

    def train(
        self, data: Sequence[types.Datum], loss: str, settings: Mapping[str, float | str]
    ) -> None:
        self._adam.zero_grad()
        loss_of(self, data, loss, settings).backward()
        self._adam.step()


class TableReference(Reference):
    """Scores with a table in place of a server's model."""

    def __init__(self, table: Table) -> None:
        self._table = table

    async def logprobs(self, sequences):
        with torch.no_grad():
            return [self._table.logprobs(tokens).numpy() for tokens in sequences]


def loss_of(
    table: Table, data: Sequence[types.Datum], loss: str, settings: Mapping[str, float | str]
) -> torch.Tensor:
    """The server's loss of a batch, with the table's log probabilities."""
    rows = [
        table.logprobs(
            [*each.model_input.to_ints(), int(each.loss_fn_inputs["target_tokens"].data[-1])]
        )
        for each in data
    ]
    names = set(data[0].loss_fn_inputs) - {"target_tokens"}
    inputs = {
        name: torch.cat(
            [
                torch.as_tensor(
                    np.asarray(each.loss_fn_inputs[name].data), dtype=torch.float64
                ).expand(len(row))
                for each, row in zip(data, rows, strict=True)
            ]
        )
        for name in names
    }
    sizes = tuple(len(row) for row in rows)
    return compute(LOSSES[loss], Data(torch.cat(rows), inputs, sizes), settings).loss


async def learn(
    objective: Objective, *, seed: int, steps: int = 60, reference: Reference | None = None
) -> float:
    """Return the probability of the right answer after `steps` steps of eight groups. It begins
    at 1/16."""
    rng = np.random.default_rng(seed)
    table = Table()
    for step in range(steps):
        groups = [table.group(rng, number) for number in range(8)]
        kept, _dropped = objective.select(groups)
        if kept:
            data = await objective.data(kept, reference=reference, step=step)
            table.train(data, objective.loss, objective.settings)
    return table.right
