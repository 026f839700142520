"""Runs a gateway that removes idle engines after seconds instead of minutes."""

from __future__ import annotations

import runpy

import gateway.__main__  # noqa: F401 - sets variables that gRPC reads at import
from gateway.sampling import autoscaling

autoscaling.DOWN_AFTER, autoscaling.REST_AFTER = 6.0, 12.0

if __name__ == "__main__":
    runpy.run_module("gateway", run_name="__main__")
