"""The curves of one run, or of several to compare, in groups: reward, true numbers, the user's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from gateway.api.pages.charts import Mark, line_chart
from gateway.api.pages.texts import figure
from gateway.runs.record.curves import Curve
from gateway.runs.record.progress import RecordIndex

POINTS = 300
"""Of a curve that the server draws."""
SECONDS = "tandem/seconds/"
_LABELS: Mapping[str, str] = {
    "tandem/loss": "Loss per trained token",
    "tandem/kl_mean": "KL, mean",
    "tandem/kl_k3": "KL, k3 estimate",
    "tandem/clipped_share": "Clipped share",
    "tandem/ratio_max": "Largest ratio",
    "tandem/entropy": "Entropy",
    "tandem/answer_tokens": "Tokens of an answer",
    "tandem/staleness": "Staleness in steps",
    "tandem/gap_mean": "Logprob gap, mean",
    "tandem/gap_max": "Logprob gap, largest",
    "tandem/grad_norm": "Gradient norm",
    "tandem/tokens": "Tokens of a step",
}
_FIRST = list(_LABELS)


@dataclass(frozen=True)
class Plot:
    """A metric. `last` is its newest value as text, and `drawn` is empty while it is read."""

    name: str
    label: str
    last: str
    drawn: Markup


def board_of(
    indexes: Sequence[RecordIndex],
    curves: Sequence[Mapping[str, Curve] | None],
    *,
    marks: Sequence[Mark] = (),
) -> dict[str, list[Plot]]:
    """Return the plots of runs by the title of their group. Curves that are None come later."""
    names = {name for index in indexes for name in index.last if not name.startswith(SECONDS)}
    return {
        title: [_plot(name, indexes, curves, marks) for name in group]
        for title, group in _grouped(names).items()
        if group
    }


def _grouped(names: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {"Reward": [], "Measured by Tandem": [], "Logged by the run": []}
    for name in sorted(names, key=lambda name: (_place(name), name)):
        own = "Measured by Tandem" if name.startswith("tandem/") else "Logged by the run"
        groups["Reward" if "reward" in name.lower() else own].append(name)
    return groups


def _place(name: str) -> int:
    return _FIRST.index(name) if name in _LABELS else len(_FIRST)


def _plot(
    name: str,
    indexes: Sequence[RecordIndex],
    curves: Sequence[Mapping[str, Curve] | None],
    marks: Sequence[Mark],
) -> Plot:
    label = _LABELS.get(name, name.removeprefix("tandem/"))
    lines = [
        (colour, found[name]) for colour, found in enumerate(curves, 1) if found and name in found
    ]
    return Plot(
        name=name,
        label=label,
        last=figure(indexes[0].last.get(name)) if len(indexes) == 1 else "",
        drawn=line_chart(lines, title=label, marks=marks) if lines else Markup(),
    )
