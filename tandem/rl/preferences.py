"""Learning from preferences: DPO from pairs of answers, KTO from single answers, good or bad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tandem.rl.environments.chat import Renderer
from tandem.rl.objectives import Floats, Reference, datum
from tandem.rl.policy import TinkerPolicy, Training
from tandem.rl.report import Tracked
from tandem.rl.rollouts import Prompt
from tandem.rl.sft import weights_of
from tandem.rl.supervised import Fitted, SFTConfig, fit, open_client, tokenizer_of
from tandem.rl.tasks import blocking

if TYPE_CHECKING:
    from tinker import types

_SCORED_AT_ONCE = 64
_FILE = "reference.float32"


@dataclass(frozen=True)
class Preference:
    """Two answers to a prompt, the first of which is better."""

    prompt: Prompt
    chosen: str
    rejected: str


@dataclass(frozen=True)
class Judgement:
    """An answer to a prompt, and whether it is good."""

    prompt: Prompt
    answer: str
    good: bool


@dataclass(frozen=True, kw_only=True)
class DPOConfig(SFTConfig):
    """Settings of `dpo`. `beta` is the penalty for leaving the reference. `loss` is "dpo" or
    "ipo"."""

    beta: float = 0.1
    loss: Literal["dpo", "ipo"] = "dpo"


@dataclass(frozen=True, kw_only=True)
class KTOConfig(SFTConfig):
    """Settings of `kto`. `beta` is as for DPO. The weights are those of good and bad answers.
    If one answer of four is good, a `desirable_weight` of 3 balances them.

    `estimate_kl` computes the KL to the reference for each batch, from prompts with the answers of
    other rows. This costs a forward pass. Without it the KL counts as 0."""

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    estimate_kl: bool = True


async def dpo_async(
    training: Training,
    preferences: Sequence[Preference],
    config: DPOConfig,
    *,
    reference: Reference | None = None,
    tokenizer: Any = None,
    evaluation: Sequence[Preference] = (),
    tracked: Tracked | Literal[False] | None = None,
) -> Fitted:
    """Train a model to prefer the chosen answers to the rejected ones.

    The reference is by default the model at the start: its log probabilities are computed before
    the first step, and kept in `config.out`. Steps and evaluations have `loss`, `accuracy` and
    `margin`."""
    policy, state = await open_client(training, config, rows=len(preferences))
    renderer = Renderer(await tokenizer_of(policy, tokenizer))

    def rows(chosen: Sequence[Preference]) -> list[_PreferenceRow]:
        return [
            _PreferenceRow.of(each.prompt, answer, renderer)
            for each in chosen
            for answer in (each.chosen, each.rejected)
        ]

    trained, held_out = rows(preferences), rows(evaluation)
    scores = await _reference_scores(
        policy, [*trained, *held_out], reference, folder=config.out, started=state.step > 0
    )
    count = len(trained)
    return await fit(
        policy,
        _Pairs(trained, scores[:count], config),
        config,
        state=state,
        evaluation=_Pairs(held_out, scores[count:], config) if held_out else None,
        tracked=tracked,
    )


dpo = blocking(dpo_async)


async def kto_async(
    training: Training,
    judgements: Sequence[Judgement],
    config: KTOConfig,
    *,
    reference: Reference | None = None,
    tokenizer: Any = None,
    evaluation: Sequence[Judgement] = (),
    tracked: Tracked | Literal[False] | None = None,
) -> Fitted:
    """Train a model towards good answers and away from bad ones.

    The reference is as for `dpo`. Steps have the `loss`, and the answers' gain over the reference
    times β: `good_reward` and `bad_reward`. Evaluations have the `loss`."""
    policy, state = await open_client(training, config, rows=len(judgements))
    renderer = Renderer(await tokenizer_of(policy, tokenizer))

    def rows(chosen: Sequence[Judgement]) -> list[_PreferenceRow]:
        """Return the answers, then each prompt with the answer of another row for the KL."""
        answers = [_PreferenceRow.of(each.prompt, each.answer, renderer) for each in chosen]
        others = [*answers[1:], *answers[:1]]
        pairs = zip(answers, others, strict=True)
        mismatched = [_PreferenceRow(row.prompt, other.answer) for row, other in pairs]
        return answers + mismatched * config.estimate_kl

    trained, held_out = rows(judgements), rows(evaluation)
    scores = await _reference_scores(
        policy, [*trained, *held_out], reference, folder=config.out, started=state.step > 0
    )
    count = len(trained)
    return await fit(
        policy,
        _Judgements(policy, judgements, trained, scores[:count], config),
        config,
        state=state,
        evaluation=_HeldOutJudgements(policy, evaluation, held_out, scores[count:], config)
        if held_out
        else None,
        tracked=tracked,
    )


kto = blocking(kto_async)


@dataclass(frozen=True)
class _PreferenceRow:
    prompt: list[int]
    answer: list[int]

    @classmethod
    def of(cls, prompt: Prompt, answer: str, renderer: Renderer) -> _PreferenceRow:
        return cls(renderer.prompt(prompt), renderer.answer(prompt, answer))

    @property
    def sequence(self) -> list[int]:
        return [*self.prompt, *self.answer]

    def datum(self, **inputs: Floats) -> types.Datum:
        return datum(self.sequence, weights=weights_of(self.prompt, self.answer), **inputs)


class _Pairs:
    def __init__(self, rows: list[_PreferenceRow], scores: list[Floats], config: DPOConfig) -> None:
        self._rows, self._scores = rows, scores
        self.loss: str = config.loss
        self.settings: Mapping[str, float | str] = {"beta": config.beta, "aggregation": "mean"}

    def __len__(self) -> int:
        return len(self._rows) // 2

    async def data(self, rows: Sequence[int]) -> list[types.Datum]:
        places = [place for row in rows for place in (2 * row, 2 * row + 1)]
        return [self._rows[place].datum(ref_logprobs=self._scores[place]) for place in places]

    def values(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {
            "loss": metrics["loss:sum"],
            **{
                name: metrics[f"{name}:mean"]
                for name in ("accuracy", "margin")
                if f"{name}:mean" in metrics
            },
        }


class _Judgements:
    """`rows` are the answers, and then those for the KL, if it is estimated."""

    loss = "kto"

    def __init__(
        self,
        policy: TinkerPolicy,
        judgements: Sequence[Judgement],
        rows: list[_PreferenceRow],
        scores: list[Floats],
        config: KTOConfig,
    ) -> None:
        count = len(judgements)
        self._policy = policy
        self._rows, self._mismatched = rows[:count], rows[count:]
        self._scores, self._others = scores[:count], scores[count:]
        self._good = [each.good for each in judgements]
        self.settings: Mapping[str, float | str] = {
            "beta": config.beta,
            "aggregation": "mean",
            "desirable_weight": config.desirable_weight,
            "undesirable_weight": config.undesirable_weight,
        }

    def __len__(self) -> int:
        return len(self._rows)

    async def data(self, rows: Sequence[int]) -> list[types.Datum]:
        kl = np.array([await self._estimate_kl(rows)])
        return [
            self._rows[row].datum(
                ref_logprobs=self._scores[row], desirable=np.array([float(self._good[row])]), z0=kl
            )
            for row in rows
        ]

    async def _estimate_kl(self, rows: Sequence[int]) -> float:
        if not self._mismatched:
            return 0.0
        chosen = [self._mismatched[row] for row in rows]
        found = await _trainer_scores(self._policy, chosen)
        gains = [
            float(((policy - self._others[row]) * weights_of(each.prompt, each.answer)).sum())
            for policy, each, row in zip(found, chosen, rows, strict=True)
        ]
        return max(0.0, float(np.mean(gains)))

    def values(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {
            "loss": metrics["loss:sum"],
            **{
                f"{kind}_reward": metrics[f"{name}_reward:sum"] / metrics[f"{name}:sum"]
                for kind, name in (("good", "desirable"), ("bad", "undesirable"))
                if metrics.get(f"{name}:sum")
            },
        }


class _HeldOutJudgements(_Judgements):
    def values(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """A batch without good answers has no reward of them, so only the loss has a mean."""
        return {"loss": metrics["loss:sum"]}


async def _reference_scores(
    policy: TinkerPolicy,
    rows: Sequence[_PreferenceRow],
    reference: Reference | None,
    *,
    folder: Path | None,
    started: bool,
) -> list[Floats]:
    """Return the reference's log probabilities of each row [tokens - 1].

    Raises `ValueError` if the model has left its start, and `folder` has not the scores of it."""
    if reference is not None:
        return await reference.logprobs([row.sequence for row in rows])
    lengths = [len(row.sequence) - 1 for row in rows]
    file = None if folder is None else folder / _FILE
    if started:
        if file is None or not file.exists():
            raise ValueError(f"{folder} has no {_FILE}, and the model is no longer at its start")
        flat = np.fromfile(file, "<f4")
        if len(flat) != sum(lengths):
            raise ValueError(f"{file} is of another dataset: choose another folder as `out`")
        return np.split(flat, np.cumsum(lengths)[:-1])
    found = await _trainer_scores(policy, rows)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        np.concatenate(found).astype("<f4").tofile(partial)
        partial.replace(file)
    return found


async def _trainer_scores(policy: TinkerPolicy, rows: Sequence[_PreferenceRow]) -> list[Floats]:
    """Return the log probabilities of rows under the trained model, by forward passes."""
    data = [row.datum() for row in rows]
    pending = [
        policy.training.forward(data[first : first + _SCORED_AT_ONCE], "cross_entropy")
        for first in range(0, len(data), _SCORED_AT_ONCE)
    ]
    outputs = [output for future in pending for output in (await future).loss_fn_outputs]
    return [np.asarray(output["logprobs"].data, np.float64) for output in outputs]
