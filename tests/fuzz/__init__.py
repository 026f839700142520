"""Send what no client would send: `make fuzz`, and a short run of it among the tests.

The same seed gives the same bodies. A body that found a fault is kept in `regressions/`, and
every run sends it again.
"""
