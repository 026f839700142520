"""Chaos: experiments train while a seeded killer works, and come out as if nobody had been there.

`python -m tests.chaos --faults 150 --seed 1` prints each fault with the seconds until every
experiment has its next result. `machine` is what the killer works on: `tandem up` on a small disk,
behind a proxy. `killer` has the faults; to add one, add its method to the table there.
`experiments` has what trains, and `chaos` puts them together and compares. Ten faults are a test
(`test_chaos.py`); more are in `make nightly`.
"""
