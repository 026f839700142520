"""Benchmarks that compare Tandem with its floor, the same work without Tandem: `make bench`.

Each module measures one thing. `__main__` runs them in one run. `record` writes the results, with
machine, versions and date, to `results/`. Separate programs are `gateway_load` (`make
bench-gateway`), `gpu` (`make bench-gpu`), `history` (`make bench-history`), `memory` (`make
bench-memory`), `overlap` (`make bench-overlap`), `recovery` (`make bench-recovery`), `rerun` (`make
bench-rerun`), `rollouts` (`make bench-rollouts`), `tracking` (`make bench-tracking`) and `versus`
(this checkout beside another one).

To add a benchmark, write a module with a function that returns rows, and call it in a section of
`__main__`."""
