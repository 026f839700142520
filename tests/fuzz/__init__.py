"""Requests that no client would send. `make fuzz` runs many, the tests a few.

The same seed gives the same bodies. Every run also sends the bodies of `regressions/`, which found
faults."""
