"""Objectives: how groups of rollouts become a batch for one of the server's losses.

An objective has four parts: an estimator of advantages (`advantages.py`), a loss of the server with
its settings, an aggregation, and a selection of groups. To add one, add a row to `OBJECTIVES`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from tandem.rl.advantages import dr_grpo, grpo, reward, rloo
from tandem.rl.rollouts import Group, Rollout
from tandem.rl.selection import dynamic_sampling, soft_overlong
from tandem.rl.tasks import all_of

if TYPE_CHECKING:
    import tinker
    from tinker import types

Item = TypeVar("Item")
Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]
Aggregation = Literal["token_sum", "token_mean", "seq_mean_token_mean", "constant"]

_LARGEST_LOG_RATIO = 20.0
"""The server's losses have the same bound."""
_REFERENCE_REQUESTS, _REFERENCE_SECONDS = 64, 1800.0
"""Bounds of one batch: requests under way, and its time."""


class Reference:
    """A policy that scores rollouts: a frozen reference, or a teacher.

    `client` is a sampling client of the base model, of a checkpoint, or of another model with the
    same tokens."""

    def __init__(self, client: tinker.SamplingClient) -> None:
        self._client = client

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[Floats]:
        """Return the log probabilities of sequences [tokens]: each [tokens - 1], from the second
        token on. Raises `TimeoutError` after half an hour."""
        from tinker import types

        places = asyncio.Semaphore(_REFERENCE_REQUESTS)

        async def score(tokens: Sequence[int]) -> Floats:
            async with places:
                found = await self._client.compute_logprobs(
                    types.ModelInput.from_ints(list(tokens))
                )
            return np.asarray(found[1:], np.float64)

        async with asyncio.timeout(_REFERENCE_SECONDS):
            return await all_of([score(tokens) for tokens in sequences])


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A way to learn from groups of rollouts. `objective(name)` makes one.

    `loss` and `settings` are those of the server (docs/training.md). `estimator` turns the rewards
    [1, rollouts] of a group into advantages. None learns from the reference alone.

    The server's losses are sums. `aggregation` divides the advantages, so that the loss of a batch
    is a mean however the batch is sent. `constant` divides by datums · `max_length`.

    `reference_weight` adds that weight · (ref - mu) to each token's advantage, for log
    probabilities ref under the reference and mu under the sampler. Its gradient is that of the KL
    to the reference. Without an estimator, the batch's mean of ref - mu is subtracted: a baseline
    keeps the gradient, and good tokens gain where all ratios are negative. With `kl_type` the
    server adds its own estimate to the loss instead, and aggregates.

    `dynamic_sampling` drops groups with equal rewards. `overlong_buffer` lowers the rewards of
    answers within that many tokens of `max_tokens`, by 1 at most. `mask_truncated` learns nothing
    from answers that ended at the bound."""

    name: str
    loss: str
    estimator: Callable[[Floats], Floats] | None
    aggregation: Aggregation
    settings: Mapping[str, float | str] = field(default_factory=dict)
    max_length: int = 0
    max_tokens: int = 0
    reference_weight: float = 0.0
    kl_type: str = ""
    dynamic_sampling: bool = False
    overlong_buffer: int = 0
    mask_truncated: bool = False

    def __post_init__(self) -> None:
        if self.aggregation not in get_args(Aggregation):
            known = ", ".join(get_args(Aggregation))
            raise ValueError(f"aggregation is {self.aggregation!r}; use one of {known}")
        if self.aggregation == "constant" and self.max_length < 1:
            raise ValueError("the aggregation constant needs max_length, or max_tokens")
        if self.overlong_buffer and not 0 < self.overlong_buffer <= self.max_tokens:
            raise ValueError(
                f"overlong_buffer is {self.overlong_buffer}; it must be between 1 and max_tokens, "
                f"which is {self.max_tokens}"
            )

    @property
    def needs_reference(self) -> bool:
        return self.reference_weight != 0

    def check_group_size(self, size: int) -> None:
        """Raise `ValueError` if groups of this size have no advantages."""
        if size < 2 and self.estimator not in (None, reward):
            raise ValueError(
                f"{self.name} compares the answers to an example, and group_size is {size}; use at "
                "least 2"
            )

    def select(self, groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
        """Return the groups to train, and the others. The loop samples new groups for them."""
        if not self.dynamic_sampling:
            return list(groups), []
        kept: list[Group] = []
        flat: list[Group] = []
        for group in groups:
            (kept if _differ(group.rewards) else flat).append(group)
        return kept, flat

    def advantages(self, group: Group) -> Floats:
        """Return the advantages of a group's rollouts [rollouts], before the aggregation."""
        if self.estimator is None:
            return np.zeros(len(group.rollouts))
        rewards = np.asarray(group.rewards, np.float64)
        if self.overlong_buffer:
            lengths = np.array([_longest_answer(rollout) for rollout in group.rollouts])
            rewards = rewards + soft_overlong(
                lengths, longest=self.max_tokens, buffer=self.overlong_buffer
            )
        found: Floats = self.estimator(rewards[None])[0]
        return found

    async def data(
        self,
        groups: Sequence[Group],
        *,
        reference: Reference | None = None,
        part: int = 0,
        parts: int = 1,
    ) -> list[types.Datum]:
        """Return a datum for each rollout, in order. Of several `parts`, each has every `parts`-th
        rollout, so answers to many examples. Advantages are those of whole groups.

        Its inputs are `target_tokens`, `logprobs`, `advantages` and `mask`, which is 0 for tokens
        of prompts and environments. With the setting `max_staleness`, the trainer leaves out older
        datums by their `weight_step`. Raises `ValueError` without a needed reference."""
        rollouts = [rollout for group in groups for rollout in group.rollouts][part::parts]
        rows = [
            _Row.of(rollout, masked=self._masks(rollout)) async for rollout in _in_turns(rollouts)
        ]
        flat = [float(value) for group in groups for value in self.advantages(group)][part::parts]
        values = [np.where(row.mask > 0, each, 0.0) for row, each in zip(rows, flat, strict=True)]
        extra: list[dict[str, Floats | Integers]] = [{} for _ in rows]
        if "max_staleness" in self.settings:
            extra = [{"weight_step": row.steps} for row in rows]
        if self.needs_reference:
            if reference is None:
                raise ValueError(f"{self.name} with a KL or a teacher needs a reference")
            scored = await reference.logprobs([row.sequence for row in rows])
            if self.kl_type:
                for inputs, found in zip(extra, scored, strict=True):
                    inputs["ref_logprobs"] = found
            else:
                ratios = [
                    _log_ratio(found, row.logprobs) for row, found in zip(rows, scored, strict=True)
                ]
                baseline = 0.0
                if self.estimator is None:
                    baseline = _mean(ratios, [row.mask for row in rows])
                values = [
                    value + self.reference_weight * row.mask * (ratio - baseline)
                    for value, row, ratio in zip(values, rows, ratios, strict=True)
                ]
        if not self.kl_type:
            weights = self._weights([row.mask for row in rows])
            values = [value * weight for value, weight in zip(values, weights, strict=True)]
        return [
            row.datum(advantages=value, **inputs)
            async for row, value, inputs in _in_turns(zip(rows, values, extra, strict=True))
        ]

    def _masks(self, rollout: Rollout) -> bool:
        return self.mask_truncated and rollout.truncated

    def _weights(self, masks: Sequence[Floats]) -> list[float]:
        """Return the factor of each datum's token losses."""
        count = max(len(masks), 1)
        if self.aggregation == "token_mean":
            return [1 / max(sum(float(mask.sum()) for mask in masks), 1.0)] * len(masks)
        if self.aggregation == "seq_mean_token_mean":
            return [1 / (count * max(float(mask.sum()), 1.0)) for mask in masks]
        if self.aggregation == "constant":
            return [1 / (count * self.max_length)] * len(masks)
        return [1.0] * len(masks)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A rollout as one sequence. `logprobs`, `mask` and `steps` [tokens - 1] are for the second
    token and later ones. `steps` is -1 where nothing was sampled."""

    sequence: list[int]
    logprobs: Floats
    mask: Floats
    steps: Integers

    @classmethod
    def of(cls, rollout: Rollout, *, masked: bool) -> _Row:
        sequence: list[int] = []
        logprobs: list[float] = []
        mask: list[float] = []
        steps: list[int] = []
        for turn in rollout.turns:
            sequence += [*turn.observation, *turn.tokens]
            logprobs += [*(0.0 for _ in turn.observation), *turn.logprobs]
            mask += [*(0.0 for _ in turn.observation), *(float(not masked) for _ in turn.tokens)]
            steps += [*(-1 for _ in turn.observation), *turn.steps]
        return cls(
            sequence=sequence,
            logprobs=np.array(logprobs[1:]),
            mask=np.array(mask[1:]),
            steps=np.array(steps[1:], np.int64),
        )

    def datum(self, **inputs: Floats | Integers) -> types.Datum:
        return datum(self.sequence, logprobs=self.logprobs, mask=self.mask, **inputs)


def datum(sequence: Sequence[int], **inputs: Floats | Integers) -> types.Datum:
    """Return a datum that predicts each token of a sequence [tokens] from those before it.

    The other inputs are [tokens - 1], or [1] for one value. They become float32, or stay int64."""
    from tinker import types

    arrays = {
        name: values if values.dtype == np.int64 else np.asarray(values, np.float32)
        for name, values in inputs.items()
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(sequence[:-1])),
        loss_fn_inputs={
            "target_tokens": np.asarray(sequence[1:], np.int64),
            **arrays,
        },
    )


async def _in_turns(items: Iterable[Item]) -> AsyncIterator[Item]:
    """Let other tasks run between the items: a batch of thousands takes seconds."""
    for number, item in enumerate(items):
        if number % 32 == 31:
            await asyncio.sleep(0)
        yield item


def _longest_answer(rollout: Rollout) -> int:
    """`max_tokens` bounds an answer. An episode may have more."""
    return max((len(turn.tokens) for turn in rollout.turns), default=0)


def _differ(rewards: Sequence[float]) -> bool:
    array = np.asarray(rewards)[None]
    return bool(len(rewards) and dynamic_sampling(array > array.min())[0])


def _mean(values: Sequence[Floats], masks: Sequence[Floats]) -> float:
    """Return the mean over the tokens with mask 1."""
    count = sum(float(mask.sum()) for mask in masks)
    total = sum(float(each @ mask) for each, mask in zip(values, masks, strict=True))
    return total / max(count, 1.0)


def _log_ratio(reference: Floats, logprobs: Floats) -> Floats:
    """Return ref - mu, bounded. It is 0 for a token whose mu is not finite, which the server
    drops."""
    known = np.isfinite(logprobs)
    ratio = np.where(np.isnan(reference), 0.0, reference) - np.where(known, logprobs, 0.0)
    return np.where(known, np.clip(ratio, -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO), 0.0)


OBJECTIVES: Mapping[str, Objective] = {
    each.name: each
    for each in (
        Objective(  # arXiv 2402.03300
            name="grpo", loss="ppo", estimator=grpo, aggregation="seq_mean_token_mean"
        ),
        Objective(  # arXiv 2503.20783; max_length is max_tokens
            name="dr_grpo", loss="ppo", estimator=dr_grpo, aggregation="constant", max_length=1
        ),
        Objective(  # arXiv 2402.14740: a mean over answers, without a division by their lengths
            name="rloo",
            loss="importance_sampling",
            estimator=rloo,
            aggregation="constant",
            max_length=1,
        ),
        Objective(  # arXiv 2503.14476
            name="dapo",
            loss="ppo",
            settings={"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
            estimator=grpo,
            aggregation="token_mean",
            dynamic_sampling=True,
        ),
        Objective(  # arXiv 2507.18071
            name="gspo", loss="gspo", estimator=grpo, aggregation="seq_mean_token_mean"
        ),
        Objective(  # arXiv 2506.13585
            name="cispo", loss="cispo", estimator=grpo, aggregation="token_mean"
        ),
        Objective(  # Williams, 1992: without a baseline
            name="reinforce",
            loss="importance_sampling",
            estimator=reward,
            aggregation="token_mean",
        ),
        Objective(  # arXiv 2306.13649, with reverse KL and no gradient through the samples
            name="distillation",
            loss="importance_sampling",
            estimator=None,
            aggregation="token_mean",
            reference_weight=1.0,
        ),
    )
}

_OPTIONS = {each.name for each in fields(Objective)} - {
    "name",
    "loss",
    "settings",
    "estimator",
    "max_tokens",
    "reference_weight",
}


def objective(
    name: str, *, max_tokens: int = 0, kl_coefficient: float = 0.0, **options: float | str | bool
) -> Objective:
    """Return the objective of a name, with other options.

    `max_tokens` is the bound of an answer. `kl_coefficient` weighs the KL to the reference.
    `options` are fields of `Objective`, and settings of the server's loss such as
    `clip_high_threshold`, `correction` or `tis_cap`. Raises `ValueError` for an unknown name.
    Example: `objective("grpo", correction="tis", tis_cap=3.0).settings["tis_cap"]` is `3.0`."""
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}; known: {', '.join(OBJECTIVES)}")
    found = OBJECTIVES[name]
    own: dict[str, object] = {key: value for key, value in options.items() if key in _OPTIONS}
    settings = {**found.settings}
    settings |= {key: _setting(value) for key, value in options.items() if key not in _OPTIONS}
    if name == "dr_grpo" and "max_length" not in own:
        own["max_length"] = max_tokens
    if kl_coefficient and found.estimator is not None:
        own["reference_weight"] = kl_coefficient
    elif kl_coefficient and "kl_type" not in own:
        raise ValueError(
            f"{name} takes a kl_coefficient only with kl_type: its reference is the teacher"
        )
    if "kl_type" in own:
        if not kl_coefficient:
            raise ValueError("kl_type needs a kl_coefficient above 0")
        aggregation = str(own.get("aggregation", found.aggregation))
        settings |= {
            "kl_coeff": kl_coefficient,
            "kl_type": str(own["kl_type"]),
            "aggregation": aggregation,
        }
        if aggregation == "constant":
            settings["max_length"] = float(str(own.get("max_length", found.max_length)))
    return replace(found, settings=settings, max_tokens=max_tokens, **own)  # type: ignore[arg-type]


def _setting(value: float | str | bool) -> float | str:
    return value if isinstance(value, str) else float(value)
