"""Chaos tests: a seeded killer strikes while experiments train. Their results must not change.

`python -m tests.chaos --faults 150 --seed 1` prints each fault with the seconds until every
experiment has its next result. `make nightly` runs `test_chaos.py`.

`machine` is `tandem up` on a small disk, behind a proxy. `killer` has the table of faults. `chaos`
runs the `experiments` and compares them."""
