"""Runs the scripts over environments and seeds, and turns the results into tables and figures.

In Python, `from benchmark import logs` reads runs: `logs.find("runs/mine")`.
"""

from benchmark.lab import logs

__all__ = ["logs"]
