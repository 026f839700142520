"""Chaos tests: a seeded killer strikes while experiments train. Their results must not change.

`python -m tests.chaos --faults 150 --seed 1` prints each fault with the seconds until every
experiment has its next result. `machine` is `tandem up` on a small disk, behind a proxy. To add a
fault, add a method to the table in `killer`. `chaos` runs the `experiments` and compares them. Ten
faults are a test (`test_chaos.py`), more are in `make nightly`."""
