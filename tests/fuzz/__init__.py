"""Bodies that no client would send: `make fuzz`, and a short run of it among the tests.

The same seed gives the same bodies. A body that found a fault is kept in `regressions/`, and
sent again by every run of the tests.
"""
