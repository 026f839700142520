"""Blueprints: trainings that somebody else can repeat.

`description` reads a folder's `blueprint.toml`, and checks values of its parameters. `catalog`
finds the folders. `running` starts the folder's `train.py` in a process of its own (`program`), and
compares its numbers with the bounds. `junit` writes the report for other systems. `approval`
decides whether an event of a build system starts a run. `notebook` has the functions of our
notebooks.

To add a blueprint, make a folder with both files below `blueprints/`, or name a package with such
folders in the entry-point group `tandem.blueprints`. `train` gets a `BlueprintRun`, and returns
numbers."""

from tandem.blueprints.run import BlueprintRun

__all__ = ["BlueprintRun"]
