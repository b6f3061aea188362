"""What the testbed itself costs, measured: `python -m tools.bench`."""
