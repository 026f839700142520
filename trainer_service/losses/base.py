"""What a loss is: its inputs, its settings and a pure function of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from trainer_service.losses.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

InputShape = Literal["entry", "datum", "either", "free"]
SettingValue = float | str


@dataclass(frozen=True)
class Input:
    """One tensor of `loss_fn_inputs`, beside `target_tokens`.

    `shape`: "entry" is that of the targets ([N] or [N, K]); "datum" is one number per datum
    ([] or [1]); "either" is one of the two. A loss is given all of these as float [E], a
    datum's number repeated for its entries. "free" is any shape of `rank` dimensions, of floats
    or integers, handed over datum by datum in `Layout.arrays`.

    Where `required` is false, or its `needed_with` (the name of a setting) is 0, datums may lack
    it. If all datums lack it, a loss finds no such input, unless `default` is a number; if
    some do, they get `default`: a number, or the name of another input or of a setting.
    `finite` False lets NaN and infinities through, for the loss to drop.
    """

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
    """One value of `loss_fn_config`. The type is that of the default.

    `low` and `high` are the bounds of a number, both allowed (`above` makes `low` itself too
    low); `choices` are the texts that may be given, any text if there are none.
    """

    name: str
    default: SettingValue
    meaning: str
    low: float | None = None
    high: float | None = None
    above: bool = False
    choices: tuple[str, ...] = ()


class Settings:
    """The checked settings of one request: every one that the loss has, given or default."""

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
class LossResult:
    """`loss`: the scalar to differentiate. `sums` and `maxima`: scalars without gradient, in the
    order of the loss's `sum_names` and `max_names`, that are added up, or of which the greatest
    is taken, over micro-batches and ranks."""

    loss: Tensor
    sums: tuple[Tensor, ...] = ()
    maxima: tuple[Tensor, ...] = ()


Compute = Callable[["Tensor", Mapping[str, "Tensor"], Settings, Layout], LossResult]


@dataclass(frozen=True)
class Loss:
    """A loss over the E target tokens of a micro-batch:
    `compute(logprobs [E], inputs {name: [E]}, settings, layout)`.

    It is called once for each micro-batch, and its results are added up; what it needs of the
    request as a whole is in `layout.totals`. `metrics` makes the reported numbers (keys
    `name:reduction`, exactly one colon) out of the combined `sum_names` and `max_names`; its
    keys are the same for every batch, since the SDK combines chunks by them.

    `group` consecutive datums stay together in one micro-batch (2 for pairs). `wide` says that
    [N, K] targets are taken. `active` names the input whose entries other than 0 the loss acts
    on, if no input `mask` says so; without it all entries count. With `sampled_only`, entries
    whose provenance span is a prompt do not act. `check` raises a `UserError` for settings that
    contradict each other.
    """

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
    check: Callable[[Settings], None] = field(default=lambda settings: None)

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.inputs if each.required)

    @property
    def defaults(self) -> Settings:
        """What holds when a request gives no setting."""
        return Settings({each.name: each.default for each in self.settings})
