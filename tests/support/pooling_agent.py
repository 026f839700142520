"""Runs an agent that keeps idle trainers, but no idle engines, and gives them time to answer."""

from __future__ import annotations

import runpy

from tandem.agent import pool
from tests.support.waiting import PATIENCE

pool._IMPORTS = {"trainer": pool._IMPORTS["trainer"]}
pool._IMPORTING_NICENESS = 3
pool._HAND_OVER_SECONDS = PATIENCE

if __name__ == "__main__":
    runpy.run_module("tandem.agent", run_name="__main__")
