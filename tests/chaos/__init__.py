"""Chaos tests: a seeded killer strikes while experiments train. Their results must not change.

`python -m tests.chaos --faults 150 --seed 1` prints each fault with the seconds until every
experiment has its next result. `test_chaos.py` strikes five times, `make nightly` more often.

`machine` is `tandem up` on a small disk, behind a proxy. `killer` has the table of faults. `chaos`
runs the `experiments` and compares them."""
