"""Fuzzing: requests that no client would send. `make fuzz` runs it, and the tests run it briefly.

The same seed gives the same bodies. `regressions/` keeps bodies that found a fault, and every run
sends them again."""
