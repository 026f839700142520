"""Chaos: experiments train while a seeded killer works, and come out as if nobody had been there.

`python -m tests.chaos --faults 150 --seed 1` prints each fault with the seconds until every
experiment has its next result; ten of them are a test of `make nightly` (`test_chaos.py`).
"""
