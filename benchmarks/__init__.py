"""Measurements of Tandem beside its floor, in one run: `make bench`.

Each module measures one thing; `__main__` runs them, `record` keeps the results with the machine,
the versions and the date in `results/`. `gateway_load` (`make bench-gateway`), `gpu` (`make
bench-gpu`), `history` (`make bench-history`), `memory` (`make bench-memory`), `recovery` (`make
bench-recovery`) and `versus` (this checkout beside another one) are programs of their own.
"""
