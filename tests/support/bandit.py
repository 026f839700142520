"""A bandit for objectives: a table of logits is the policy, and the server's losses train it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import torch
from tinker import types

from tandem.rl.objectives import Objective, Reference
from tandem.rl.rollouts import Example, Group, Rollout, Turn
from tests.support.losses.cases import Data, compute
from trainer_service.losses import LOSSES, LossResult

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

    def group(self, rng: np.random.Generator, number: int, size: int = 8) -> Group:
        table = torch.log_softmax(self.logits.detach(), dim=-1).numpy()
        rollouts = [_rollout(table, rng) for _ in range(size)]
        return Group(number=number, example=Example(""), rollouts=rollouts)

    def train(
        self, data: Sequence[types.Datum], loss: str, settings: Mapping[str, float | str]
    ) -> None:
        self._adam.zero_grad()
        result_of(self, data, loss, settings).loss.backward()
        self._adam.step()

    def set_rate(self, rate: float) -> None:
        self._adam.param_groups[0]["lr"] = rate

    def state(self) -> tuple[torch.Tensor, dict[str, object]]:
        return deepcopy((self.logits.detach(), self._adam.state_dict()))

    def load(self, state: tuple[torch.Tensor, dict[str, object]]) -> None:
        logits, adam = deepcopy(state)
        with torch.no_grad():
            self.logits.copy_(logits)
        self._adam.load_state_dict(adam)


def _rollout(table: np.ndarray, rng: np.random.Generator) -> Rollout:
    tokens, logprobs = [START], []
    for _ in RIGHT:
        row = table[tokens[-1]]
        tokens.append(int((np.exp(row).cumsum() < rng.random()).sum().clip(max=VOCABULARY - 1)))
        logprobs.append(float(row[tokens[-1]]))
    turn = Turn(observation=[START], tokens=tokens[1:], logprobs=logprobs, steps=[0] * len(RIGHT))
    return Rollout(turns=[turn], reward=float(tuple(tokens[1:]) == RIGHT))


class TableReference(Reference):
    """Scores with a table in place of a server's model."""

    def __init__(self, table: Table) -> None:
        self._table = table

    async def logprobs(self, sequences):
        with torch.no_grad():
            return [self._table.logprobs(tokens).numpy() for tokens in sequences]


class TableClient:
    """A table in place of a training client. Its calls act at once. `saved` are its states, and
    `sent` is its newest batch. It is not of a Tandem gateway."""

    holder = SimpleNamespace()

    def __init__(self, saved: dict[str, tuple[torch.Tensor, dict[str, object]]]) -> None:
        self.table = Table()
        self.saved = saved
        self.steps = 0

    def get_tokenizer(self) -> Digits:
        return Digits()

    def forward(self, data, loss, settings=None):
        found = self._computed(data, loss, settings)
        return _Done(found)

    def forward_backward(self, data, loss, settings=None):
        self.sent = list(data)
        self._batch = (self.sent, loss, dict(settings or {}))
        return self.forward(data, loss, settings)

    def optim_step(self, parameters):
        self.table.set_rate(parameters.learning_rate)
        self.table.train(*self._batch)
        self.steps += 1
        return _Done(SimpleNamespace(metrics={}))

    def save_state(self, name: str):
        self.saved[name] = self.table.state()
        return _Done(SimpleNamespace(path=name))

    def _computed(self, data, loss, settings) -> SimpleNamespace:
        with torch.no_grad():
            result = result_of(self.table, data, loss, settings or {})
            rows = [self.table.logprobs(_tokens(each)).tolist() for each in data]
        names = (*LOSSES[loss].sum_names, *LOSSES[loss].max_names)
        values = (*result.sums, *result.maxima)
        sums = {name: float(value) for name, value in zip(names, values, strict=True)}
        metrics = {"loss:sum": float(result.loss), **LOSSES[loss].metrics(sums)}
        outputs = [
            {"logprobs": types.TensorData(data=row, dtype="float32", shape=[len(row)])}
            for row in rows
        ]
        return SimpleNamespace(metrics=metrics, loss_fn_outputs=outputs)


class _Done:
    """A future of the SDK that has its value."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __await__(self):
        return self._value
        yield


class Digits:
    """A tokenizer whose tokens are the digits."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [int(digit) for digit in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(str, ids))


def _tokens(datum: types.Datum) -> list[int]:
    return [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].data[-1])]


def result_of(
    table: Table, data: Sequence[types.Datum], loss: str, settings: Mapping[str, float | str]
) -> LossResult:
    """The server's loss of a batch, with the table's log probabilities."""
    columns = {
        name: [np.asarray(each.loss_fn_inputs[name].data) for each in data]
        for name in data[0].loss_fn_inputs
    }
    targets = columns.pop("target_tokens")
    sizes = tuple(map(len, targets))
    before = np.concatenate([each.model_input.to_ints() for each in data])
    logprobs = torch.log_softmax(table.logits, dim=-1)[before, np.concatenate(targets)]
    inputs = {
        name: torch.from_numpy(
            np.concatenate(
                [np.broadcast_to(row, size) for row, size in zip(rows, sizes, strict=True)]
            ).astype(np.float64)
        )
        for name, rows in columns.items()
    }
    return compute(LOSSES[loss], Data(logprobs, inputs, sizes), settings)


async def learn(
    objective: Objective,
    *,
    seed: int,
    steps: int = 40,
    rate: float = 0.1,
    reference: Reference | None = None,
) -> float:
    """Return the probability of the right answer after `steps` steps of eight groups. It begins
    at 1/16. A negative `rate` flips the sign of each gradient."""
    rng = np.random.default_rng(seed)
    table = Table()
    table.set_rate(rate)
    for _ in range(steps):
        groups = [table.group(rng, number) for number in range(8)]
        kept, _flat = objective.select(groups)
        if kept:
            data = await objective.data(kept, reference=reference)
            table.train(data, objective.loss, objective.settings)
    return table.right
