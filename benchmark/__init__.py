"""Runs the scripts over environments and seeds, and turns the results into tables and figures."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`from benchmark import logs` reads runs in Python; it loads when it is used."""
    if name != "logs":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from benchmark.lab import logs

    return logs
