"""Writes a notebook for each blueprint: `python -m scripts.blueprint_notebooks`, after a change of
one's parameters."""

from __future__ import annotations

import json
from typing import Any

from tandem.blueprints.catalog import find_blueprints
from tandem.blueprints.description import Blueprint, Value

_CURVES = {"sft-chat": "loss", "dpo-preferences": "loss"}
"""The metric to draw, if not the reward."""
_NEEDS = """It needs a gateway. Start `tandem up` with a fitting model in a terminal, and set
TINKER_BASE_URL and TINKER_API_KEY as it prints, before you start Jupyter. `pip install matplotlib`
draws the curve."""
_RUN = """from tandem.blueprints.notebook import curve, run

result = run(
    "{name}",
    seed=0,
{values}
)
assert not result.error, result.error
f"{{result.model}}, {{result.seconds:g}} s\""""
_NUMBERS = """for name, value in result.numbers.items():
    print(f"{name}: {value:.3f}", result.violations.get(name, ""))
print("sound" if result.sound else "beyond its bounds")"""
_CURVE = """import matplotlib.pyplot as plt

found = curve(result, "{metric}")
plt.plot(list(found), list(found.values()))
plt.xlabel("step")
plt.ylabel("{metric}");"""


def notebook_of(blueprint: Blueprint) -> str:
    """Return the notebook as text, without outputs."""
    about = [f"- `{name}`: {each.about}" for name, each in blueprint.parameters.items()]
    bounds = [f"{name} {bound}" for name, bound in blueprint.metrics.items()]
    values = [
        f"    {name}={_literal(each.default)}," for name, each in blueprint.parameters.items()
    ]
    metric = _CURVES.get(blueprint.name, "reward")
    cells = [
        _text(f"# {blueprint.title}", blueprint.about, _NEEDS),
        _text("Its parameters, with their defaults in the next cell:", "\n".join(about)),
        _code(_RUN.format(name=blueprint.name, values="\n".join(values))),
        _text(f"A sound run ends with {', '.join(bounds)}."),
        _code(_NUMBERS),
        _code(_CURVE.format(metric=metric)),
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {
        "cells": [{"id": f"cell-{number}", **cell} for number, cell in enumerate(cells)],
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _literal(value: Value) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _text(*paragraphs: str) -> dict[str, Any]:
    source = "\n\n".join(paragraphs)
    return {"cell_type": "markdown", "metadata": {}, "source": source.splitlines(keepends=True)}


def _code(source: str) -> dict[str, Any]:
    lines = source.splitlines(keepends=True)
    fields = {"execution_count": None, "metadata": {}, "outputs": []}
    return {"cell_type": "code", **fields, "source": lines}


def main() -> None:
    for name, blueprint in find_blueprints().items():
        assert isinstance(blueprint, Blueprint), blueprint
        (blueprint.folder / f"{name}.ipynb").write_text(notebook_of(blueprint), encoding="utf-8")


if __name__ == "__main__":
    main()
