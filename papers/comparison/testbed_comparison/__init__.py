"""Comparison of the testbed's metrics with the figures that publications print; papers/README.md explains its files."""
