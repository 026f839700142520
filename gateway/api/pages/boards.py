"""The curves of one run, or of several to compare, in groups: reward, true numbers, the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from gateway.api.pages.charts import Mark, line_chart
from gateway.api.pages.texts import figure
from gateway.runs.record.curves import Curve
from gateway.runs.record.progress import RecordIndex
from tandem.tracking.names import SERVER

POINTS = 300
"""Of a curve that the server draws."""
SECONDS = "tandem/seconds/"
_MOST_DRAWN = 24
"""Plots of a group."""
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
_PLACES = {name: place for place, name in enumerate(_LABELS)}


@dataclass(frozen=True)
class Plot:
    """A metric. `last` is its newest value as text. `drawn` is empty while the curve is read, and
    None if only the script draws it."""

    name: str
    label: str
    last: str
    drawn: Markup | None


def board_of(
    indexes: Sequence[RecordIndex],
    curves: Sequence[Mapping[str, Curve] | None],
    *,
    marks: Sequence[Mark] = (),
    every: bool = False,
) -> dict[str, list[Plot]]:
    """Return the plots of runs by the title of their group. Curves that are None come later. A
    group has at most 24 drawn plots, unless `every` one is drawn."""
    names = {name for index in indexes for name in index.last if not name.startswith(SECONDS)}
    groups: dict[str, list[Plot]] = {
        "Reward": [],
        "Measured by Tandem": [],
        "Logged by the run": [],
    }
    for name in sorted(names, key=lambda name: (_PLACES.get(name, len(_PLACES)), name)):
        own = "Measured by Tandem" if name.startswith(SERVER) else "Logged by the run"
        group = groups["Reward" if "reward" in name.lower() else own]
        label = _LABELS.get(name, name.removeprefix(SERVER))
        lines = [
            (colour, found[name])
            for colour, found in enumerate(curves, 1)
            if found and name in found
        ]
        drawn = None
        if every or len(group) < _MOST_DRAWN:
            drawn = line_chart(lines, title=label, marks=marks) if lines else Markup()
        last = figure(indexes[0].last.get(name)) if len(indexes) == 1 else ""
        group.append(Plot(name, label, last, drawn))
    return {title: group for title, group in groups.items() if group}
