"""Measurements of Tandem beside its floor, in one run: `make bench`.

Each file is one question. Results, with machine, versions and date, go to benchmarks/results/.
"""
