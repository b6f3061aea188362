"""Measurements of the testbed's own costs: `python -m tools.bench`."""
