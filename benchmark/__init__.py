"""Runs the scripts over environments and seeds, and turns the results into tables and figures."""
