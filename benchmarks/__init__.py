"""Benchmarks that compare Tandem with its floor, the same work without Tandem: `make bench`.

Each module measures one thing. `__main__` runs them in one run. `record` writes the results, with
machine, versions and date, to `results/`. Some modules are separate programs: `make help` lists
their targets, such as `make bench-overlap`.

To add a benchmark, write a module with a function that returns rows, and call it in a section of
`__main__`."""
