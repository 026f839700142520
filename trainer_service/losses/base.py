"""The parts of a loss: inputs, settings and a pure function of one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tandem.errors import UnknownLossSetting
from trainer_service.same_bits import same_bits

if TYPE_CHECKING:
    from torch import Tensor


InputShape = Literal["entry", "datum", "either", "free"]
SettingValue = float | str


@dataclass(frozen=True)
class Input:
    """One tensor of `loss_fn_inputs` besides `target_tokens`.

    `shape` is one of:
    - "entry": the shape of the targets, [N] or [N, K].
    - "datum": one number per datum, [] or [1].
    - "either": "entry" or "datum".
    - "free": any shape of `rank` dimensions, of floats or integers, passed datum by datum in
      `DatumLayout.arrays`.

    All but "free" reach the loss as float [E]. A datum's number is repeated for its entries.

    A datum may omit the input if `required` is false, or if the setting named by `needed_with` is
    0. If all datums omit it, the loss gets no such input, unless `default` is a number. If some
    omit it, they get `default`: a number, or the name of another input or of a setting. With
    `finite` False, the loss handles NaN and infinities itself."""

    name: str
    meaning: str
    shape: InputShape = "entry"
    required: bool = False
    needed_with: str = ""
    default: float | str | None = None
    finite: bool = True
    rank: int = 1


@dataclass(frozen=True)
class Setting:
    """One value of `loss_fn_config`, of the type of its default.

    `low` bounds a number from below, inclusively unless `above`. `choices` lists the allowed texts.
    If it is empty, any text is allowed."""

    name: str
    default: SettingValue
    meaning: str
    low: float | None = None
    above: bool = False
    choices: tuple[str, ...] = ()


class LossSettings:
    """The checked settings of one request, with defaults filled in."""

    def __init__(self, values: Mapping[str, SettingValue]) -> None:
        self._values = dict(values)

    def number(self, name: str) -> float:
        value = self._values[name]
        assert not isinstance(value, str), f"{name} is a text"
        return value

    def text(self, name: str) -> str:
        value = self._values[name]
        assert isinstance(value, str), f"{name} is a number"
        return value

    def has(self, name: str) -> bool:
        return name in self._values

    def as_dict(self) -> dict[str, SettingValue]:
        return dict(self._values)


@dataclass(frozen=True)
class Totals:
    """Counts over the whole request, equal on every rank and in every micro-batch.

    `entries` counts target tokens ([N, K] targets count N·K). `active` counts the entries that the
    loss acts on, and `active_datums` the datums with any."""

    datums: int
    entries: int
    active: int
    active_datums: int = 0


@dataclass(frozen=True)
class DatumLayout:
    """The E entries of a micro-batch of whole datums, datum after datum.

    `datum` int64 [E]: the entry's datum (0 … `datums` - 1). For a loss with a group of 2, datums 2i
    and 2i + 1 of the request are neighbours here, the first at an even index.
    `sequence` int64 [E]: the entry's sampled sequence (0 … `sequences` - 1), or -1 for a prompt.
    Without provenance spans it equals `datum`.
    `sizes`: entries of each datum. `widths`: K of each datum's [N, K] targets, 0 for [N].
    `arrays`: inputs of shape "free", one tensor of the client's shape per datum, on the host.

    Example: datums of 2 and 3 tokens have `datum` [0, 0, 1, 1, 1], `sizes` (2, 3)."""

    datum: Tensor
    datums: int
    totals: Totals
    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    sequence: Tensor
    sequences: int
    arrays: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)

    def datum_sums(self, values: Tensor) -> Tensor:
        """Sum [E] by datum: [datums]."""
        return _sums(values, self.datum, self.datums)

    def datum_means(self, values: Tensor, weights: Tensor) -> Tensor:
        """Weighted mean of [E] by datum: [datums]. A datum without weight gets 0."""
        counts = self.datum_sums(weights)
        return self.datum_sums(values * weights) / counts.where(counts != 0, counts.new_ones(()))

    def sequence_means(self, values: Tensor, weights: Tensor) -> Tensor:
        """Weighted mean by sampled sequence, for each entry: [E]. Prompt entries get 0."""
        of = self.sequence.clamp(min=0)
        weights = weights * (self.sequence >= 0)
        count = max(self.sequences, 1)  # prompts need an index too, with weight 0
        counts, sums = _sums(weights, of, count), _sums(values * weights, of, count)
        means = sums / counts.where(counts != 0, counts.new_ones(()))
        return means[of] * (self.sequence >= 0)


def _sums(values: Tensor, of: Tensor, count: int) -> Tensor:
    """Sum [E] by the index `of`: [count]."""
    with same_bits() if values.is_cuda else nullcontext():
        return values.new_zeros(count).index_add(0, of, values)


@dataclass(frozen=True)
class LossResult:
    """The result of one micro-batch.

    `loss`: the scalar to differentiate. `sums` and `maxima`: scalars without gradient, in the order
    of the loss's `sum_names` and `max_names`, which the trainer combines over micro-batches and
    ranks."""

    loss: Tensor
    sums: tuple[Tensor, ...] = ()
    maxima: tuple[Tensor, ...] = ()


Compute = Callable[["Tensor", Mapping[str, "Tensor"], LossSettings, DatumLayout], LossResult]


@dataclass(frozen=True)
class Loss:
    """A loss over the E target tokens of a micro-batch:
    `compute(logprobs [E], inputs {name: [E]}, settings, layout)`.

    The results of micro-batches are added up. `metrics` turns the combined `sum_names` and
    `max_names` into reported numbers. Its keys are `name:reduction` with exactly one colon, and
    equal for every batch, because the SDK combines chunks by them.

    - `group`: consecutive datums that stay together in one micro-batch (2 for pairs).
    - `wide`: [N, K] targets are allowed.
    - `active`: the loss acts on nonzero entries of this input, unless there is a `mask`.
      Without either, all entries count.
    - `sampled_only`: entries with a prompt's provenance span do not act.
    - `check` raises a `UserError` for settings that contradict each other.
    - `by_entry`: with these settings, the gradient at each entry depends only on that entry's
      logprob. It can then be computed before the others are known (`models/logprobs.py`).
    - `failure` returns the reason if the loss failed on this rank's datums, or "". After a failure
      the results are discarded."""

    name: str
    compute: Compute
    inputs: tuple[Input, ...] = ()
    settings: tuple[Setting, ...] = ()
    sum_names: tuple[str, ...] = ()
    max_names: tuple[str, ...] = ()
    metrics: Callable[[Mapping[str, float]], dict[str, float]] = field(default=lambda sums: {})
    group: int = 1
    wide: bool = False
    active: str = ""
    sampled_only: bool = False
    check: Callable[[LossSettings], None] = field(default=lambda settings: None)
    by_entry: Callable[[LossSettings], bool] = field(default=lambda settings: False)
    failure: Callable[[], str] | None = None

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.inputs if each.required)

    @property
    def defaults(self) -> LossSettings:
        return LossSettings({each.name: each.default for each in self.settings})


@dataclass(frozen=True)
class DefinedLoss:
    """A loss made for each request from a definition that the session registered.

    `define` raises a `UserError` for a wrong definition. The definition is empty if the request has
    none."""

    name: str
    define: Callable[[bytes], Loss]


AGGREGATIONS = ("token_sum", "token_mean", "seq_mean_token_mean", "constant")
AGGREGATION_SETTINGS = (
    Setting("aggregation", "token_sum", "how token losses become one number", choices=AGGREGATIONS),
    Setting("max_length", 0.0, "L of the aggregation `constant`, which needs it", low=0.0),
)


def check_aggregation(settings: LossSettings) -> None:
    """Raise `UnknownLossSetting` for `constant` without its length."""
    if settings.text("aggregation") == "constant" and not settings.number("max_length"):
        raise UnknownLossSetting(
            "aggregation 'constant' divides by max_length: set max_length to the longest answer "
            "allowed, in tokens"
        )


def aggregate(
    values: Tensor, active: Tensor, settings: LossSettings, layout: DatumLayout
) -> Tensor:
    """Reduce `values` [E] to one number. Only entries with `active` 1 count ([E], 0 or 1).

    - `token_sum`: Σ, as in the Tinker protocol. The default.
    - `token_mean`: Σ / active tokens of the request (DAPO, arXiv 2503.14476).
    - `seq_mean_token_mean`: the mean over datums of a datum's mean (GRPO, arXiv 2402.03300). A
      datum without an active token counts as 0.
    - `constant`: Σ / (datums · `max_length`) (Dr. GRPO, arXiv 2503.20783).

    The counts cover the whole request, so the sum over micro-batches does not depend on the split.
    """
    values = values * active
    kind = settings.text("aggregation")
    if kind == "token_sum":
        return values.sum()
    if kind == "token_mean":
        return values.sum() / max(layout.totals.active, 1)
    if kind == "constant":
        return values.sum() / (layout.totals.datums * settings.number("max_length"))
    counts = layout.datum_sums(active).clamp(min=1)
    return (layout.datum_sums(values) / counts).sum() / layout.totals.datums
